"""`nextscale`, and `python -m nextscale`."""

import sys


def main() -> None:
    try:
        from .cli import app  # here, so that Ctrl-C during the import ends in one line too

        app()
    except KeyboardInterrupt:
        print("Stopped. Nothing was written.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

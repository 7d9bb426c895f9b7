"""Settings of a server: network, security, batching and limits."""

import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..errors import NextscaleError, SettingError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")


def matching(pattern: str, expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"must be {expected}")
        return text

    return AfterValidator(check)


Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Key = Annotated[str, matching(r"[!-~]{16,}", "16 or more printable ASCII characters without spaces, such as from `openssl rand -hex 32`")]
Host = Annotated[
    str, matching(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+", "a name without a port or wildcard, such as studio.example or [fe80::1]")
]
Origin = Annotated[
    str,
    matching(
        r"\*|null|(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]+)?",
        "* (any page) or an origin as browsers send it, such as https://app.example: in lower case, without the default port or a slash",
    ),
]
RootPath = Annotated[str, matching(r"(/[A-Za-z0-9._~-]+)*", "empty or a path such as /images, without a slash at the end")]


class Settings(BaseModel):
    """Frozen settings that raise SettingError, with the setting and, except for keys, its value."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            found = error.errors(include_url=False)[0]
            name, text = str(found["loc"][0]), found["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
            value = "" if name == "api_keys" else f"; got {found['input']!r:.80}"
            raise SettingError(f"{name} {text}{value}") from None


class Limits(Settings):
    """Limits of a request."""

    prompt_chars: Count = 2000
    images: Count = 10
    pixels: Count = 10 * 1024 * 1024  # of all its images together
    body_bytes: Count = 64 * 1024
    compared_bytes: Count = 32 * 1024 * 1024  # two pictures, of the studio's comparison
    edit_bytes: Count = 32 * 1024 * 1024  # of a body with pictures to edit
    upload_pixels: Count = 2**24  # of each of them
    read_seconds: Seconds = 30.0  # to receive the body


class ServeSettings(Settings):
    """Settings of a server, besides its models."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000  # 0: any free port
    root_path: RootPath = ""  # under which a proxy publishes the server
    max_batch: Count = 8
    batch_delay: Annotated[float, Field(ge=0, lt=60)] = 0.005  # seconds
    max_queue: Count = 64
    same_images: bool = False  # bit-identical alone and in any batch, by padding batches
    request_timeout: Seconds = 300.0
    shutdown_timeout: Seconds = 30.0  # for accepted requests to finish
    api_keys: tuple[Key, ...] = Field((), repr=False)
    cors_origins: tuple[Origin, ...] = ()
    allowed_hosts: tuple[Host, ...] = ()  # names of the server besides the loopback names
    log_prompts: bool = False
    limits: Limits = Limits()

    @property
    def address(self) -> str:
        host = self.host.strip("[]")
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}{self.root_path}"

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach the server."""
        if host_of(self.host) in LOOPBACK_NAMES:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def host_names(self) -> tuple[str, ...] | None:
        """Host names that requests may use; None: any. This keeps other web pages from reaching a server on the loopback."""
        return (*LOOPBACK_NAMES, *map(host_of, (self.host, *self.allowed_hosts))) if self.loopback or self.allowed_hosts else None


def host_of(header: str) -> str:
    """Returns the name in a Host header for comparison: in lower case, without the port and the final dot."""
    # (?<!:) since ::1 without brackets is an address without a port
    return re.sub(r"(?<!:):[0-9]*$", "", header).lower().removesuffix(".")


def read_api_keys(file: Path) -> tuple[str, ...]:
    """Reads one key per line; ignores empty lines and lines that begin with #."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise NextscaleError(f"the API keys in {file} cannot be read ({error}). Give a text file with one key per line.") from error
    if not (keys := tuple(line for line in lines if line and not line.startswith("#"))):
        raise SettingError(f"{file} must have an API key per line; got none. Leave the option out to serve without keys.")
    return keys


def parse_aliases(given: Iterable[str], models: tuple[str, ...]) -> dict[str, str]:
    """Reads NAME=MODEL: names by which clients may ask for a served model."""
    pairs = dict(one.partition("=")[::2] for one in given)
    for name, model in pairs.items():
        if not name.strip() or name in models or model not in models:
            raise SettingError(f"alias must be NAME=MODEL with a new name for one of {', '.join(models)}; got {name!r} for {model!r}.")
    return pairs

"""How a server runs: what it allows, whom it lets in, and for how long it waits."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..batching import require_batching
from ..errors import NextscaleError, SettingError
from ..validation import is_int, is_number

SHORTEST_KEY = 16  # characters
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]", "::1")
ORIGIN = re.compile(r"\*|null|(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]+)?")
HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    prompt_chars: int = 2000
    images: int = 10
    pixels: int = 10 * 1024 * 1024  # of all its images together
    body_bytes: int = 64 * 1024
    compared_bytes: int = 32 * 1024 * 1024  # two pictures, of the studio's comparison
    read_seconds: float = 30.0  # until the body is there

    def __post_init__(self) -> None:
        for name in ("prompt_chars", "images", "pixels", "body_bytes", "compared_bytes"):
            if not is_int(getattr(self, name), least=1):
                raise SettingError(f"{name} {getattr(self, name)!r}: give a whole number, 1 or more")


@dataclass(frozen=True)
class ServeSettings:
    """Everything that is decided when a server starts, besides its models."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 8
    batch_delay: float = 0.005
    max_queue: int = 64
    same_images: bool = False  # alone and in any batch, bit for bit: batches are filled up
    request_timeout: float = 300.0  # seconds after which a request is given up
    shutdown_timeout: float = 30.0  # seconds that accepted requests have to finish
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names under which the server is reached, besides those of the loopback
    log_prompts: bool = False
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if not is_int(self.port) or self.port > 65535:
            raise SettingError(f"port {self.port!r}: give a whole number from 0 (any that is free) to 65535")
        require_batching(self.max_batch, self.batch_delay, self.max_queue)
        for name in ("request_timeout", "shutdown_timeout"):
            seconds = getattr(self, name)
            if not is_number(seconds) or not 0 < seconds < float("inf"):
                raise SettingError(f"{name} {seconds!r}: give a number of seconds above 0")
        for name in self.allowed_hosts:
            if not HOST.fullmatch(name):
                raise SettingError(f"allowed host {name!r}: give a name without a port or wildcard, such as studio.example or [fe80::1]")
        for origin in self.cors_origins:
            if not ORIGIN.fullmatch(origin):
                raise SettingError(
                    f"CORS origin {origin!r}: give it as browsers send it, such as https://app.example,"
                    " in lower case, without the usual port, a path or a slash at the end; * is any page"
                )
        for key in self.api_keys:
            if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
                raise SettingError(
                    f"an API key of {len(key)} characters: give {SHORTEST_KEY} or more, printable ASCII without spaces,"
                    " such as the output of `openssl rand -hex 32`"
                )

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        if host_of(self.host) in LOOPBACK_NAMES:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def host_names(self) -> tuple[str, ...] | None:
        """Names that a request may address the server by; None: any. A page elsewhere cannot pretend to be a server on the loopback."""
        return (*LOOPBACK_NAMES, *map(host_of, (self.host, *self.allowed_hosts))) if self.loopback or self.allowed_hosts else None


def host_of(header: str) -> str:
    """Returns the name in a Host header as names are compared: in lower case, without the port and the final dot."""
    # (?<!:) since ::1 without brackets is an address without a port
    return re.sub(r"(?<!:):[0-9]*$", "", header).lower().removesuffix(".")


def read_api_keys(file: Path) -> tuple[str, ...]:
    """One key per line; empty lines and those that begin with # do not count."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise NextscaleError(f"the API keys in {file} cannot be read ({error}): give a text file with one key per line") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise SettingError(f"{file} holds no API key: write one per line, or leave the option out to let everybody in")
    return keys


def parse_aliases(given: Mapping[str, str] | list[str], models: tuple[str, ...]) -> dict[str, str]:
    """NAME=MODEL, by which clients that ask for another model's name get one that is served."""
    pairs = [one.partition("=")[::2] for one in given] if isinstance(given, list) else list(given.items())
    for name, model in pairs:
        if not name.strip() or model not in models:
            raise SettingError(f"alias {name!r} of {model!r}: write NAME=MODEL with a model that is served: {', '.join(models)}")
        if name in models:
            raise SettingError(f"alias {name!r} is the name of a model that is served: choose another one")
    return dict(pairs)

"""How a server's address is written, and what may stand in one. Standard library only."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from pytest_dsv41.errors import UsageError
from pytest_dsv41.text import one_line

__all__ = ["Address", "base_url", "check_url", "parse_url", "unix_path"]

_VALID: Final = "valid: http://HOST:PORT, https://HOST:PORT or unix:PATH"
_NEVER: Final = frozenset(' "<>\\^`{|}')  # RFC 3986, appendix A: none of a URI's characters
_PATH: Final = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")


@dataclass(frozen=True, slots=True)
class Address:
    """Where to connect, and what to ask for there."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def host_header(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return host if self.port == default else f"{host}:{self.port}"


def parse_url(url: str) -> Address:
    """Split an http or https URL; a user's name and password in it are left out.

    Raises:
        UsageError: another scheme, no host, a port that is none, or a character that no address
            has (a space, a control character, one outside of ASCII).
    """
    shown = one_line(url.rpartition("@")[2], 120)
    if not (url.isascii() and url.isprintable()) or _NEVER & {*url}:
        raise UsageError(f"{shown}: a character that no address has; {_VALID}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise UsageError(f"{shown}: {one_line(str(error), 120)}; {_VALID}") from None
    if parts.scheme not in ("http", "https") or port == 0 or not _is_host(host):
        raise UsageError(f"{shown}: not a server's address; {_VALID}")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    default = 443 if parts.scheme == "https" else 80
    return Address(parts.scheme, host, default if port is None else port, path)


def _is_host(host: str) -> bool:
    """Whether it is a name, or an IP address where it looks like one."""
    numbers = ":" in host or all(part.isdigit() for part in host.split("."))
    if not numbers:
        return _NAME.fullmatch(host) is not None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return "%" not in host


def check_url(url: str) -> str:
    """Return a server's address as it was given, or say what is wrong with it.

    No message shows the address where it holds a user's name or a password.

    Raises:
        UsageError: no http or https address of a host, nor `unix:PATH`.
    """
    path = unix_path(url)
    if path and "\0" not in path:
        return url
    if "@" in url:
        raise UsageError(f"a server's address holds a user's name or a password; {_VALID}")
    way = parse_url(url).path
    # Paths are joined to the address, and would land behind these.
    if "?" in url or "#" in url:
        shown = one_line(url, 120)
        raise UsageError(f"{shown}: a query or a fragment in a server's address; {_VALID}")
    # Others write such a path in another way, and it would be asked in two.
    if not _PATH.fullmatch(way) or {".", ".."} & {*way.split("/")}:
        raise UsageError(f"{one_line(url, 120)}: a path that is not in its plain form; {_VALID}")
    return url


def base_url(url: str) -> str:
    """Return `url` without a trailing slash and `/v1`; of `unix:PATH`, what is asked there."""
    if url.startswith("unix:"):
        return "http://localhost"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def unix_path(url: str) -> str | None:
    """Return PATH of `unix:PATH`, None for any other address."""
    return url.removeprefix("unix:") if url.startswith("unix:") else None

"""Addresses as people write them (`tcp://127.0.0.1:7411`), taken apart and judged.

Between configuration and whatever binds or connects. Resolves no name and opens no socket.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A control endpoint: `scheme` is tcp or ipc; `host` an address or name (a path for ipc); `port` 0 for any."""

    scheme: str
    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only processes of this host can reach it."""
        if self.scheme == "ipc":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.scheme == "ipc":
            return f"ipc://{self.host}"
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """The parts of `tcp://HOST:PORT`, `tcp://[IPV6]:PORT` or `ipc://PATH`; `*` is every IPv4 address, `localhost` is
    127.0.0.1. Raises `ConfigError`."""
    scheme, mark, rest = text.partition("://")
    if scheme == "ipc" and mark and 1 <= len(rest.encode()) <= 100 and rest.isprintable():
        return Endpoint("ipc", rest, 0)
    if scheme != "tcp" or not mark:
        raise ConfigError(f"endpoint {text!r}: write tcp://HOST:PORT, tcp://[IPV6]:PORT or ipc://PATH")
    host, colon, port = rest.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(f"endpoint {text!r}: the port must be 0..65535, as in tcp://127.0.0.1:7411")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise ConfigError(f"endpoint {text!r}: brackets are for IPv6 addresses")
    elif ":" in host:
        raise ConfigError(f"endpoint {text!r}: put an IPv6 address in brackets, as in tcp://[::1]:7411")
    host = {"*": "0.0.0.0", "localhost": "127.0.0.1"}.get(host, host)
    if re.fullmatch(r"[0-9.]+", host) or ":" in host:
        try:
            host = str(ipaddress.ip_address(host))
        except ValueError:
            raise ConfigError(f"endpoint {text!r}: {host!r} is not an IP address") from None
    elif not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})", host):
        raise ConfigError(f"endpoint {text!r}: {host!r} is not a host name")
    return Endpoint("tcp", host, int(port))

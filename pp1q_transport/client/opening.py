"""The embedded sides: a configuration out of options, and the side it opens.

Between a program and the embedded `Leader` and `Receiver`. Apart from the package itself so that a process beside a daemon loads
neither the engine nor ZeroMQ. SPEC section 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..engine import EngineConfig, Idle, new_boot_nonce
from ..errors import ConfigError
from ..session.negotiate import Role, make_hello
from .draft import Leader
from .target import Receiver

if TYPE_CHECKING:
    from ..capture.recorder import Capture
    from ..keys import KeyConfig
    from ..links.rdma_config import RdmaConfig


def configure(
    role: Role,
    *,
    listen: str | None = None,
    connect: str | None = None,
    keys: KeyConfig | None = None,
    idle: Idle | str = Idle.BLOCK,
    wait_for_peer: bool = True,
    link: str = "tcp",
    rdma: RdmaConfig | None = None,
    capture: Capture | None = None,
    **hello: object,
) -> EngineConfig:
    """The configuration of one side. `link` is "tcp", "rdma" (with its settings) or, where both sides are on one host, "shm".
    `capture` (`pp1q_transport.capture.recorder.Capture`) takes every frame; close it after the side.
    `hello` are fields of HELLO (`vocab_size`, `depth`, `support`, `draft_identity`, `target_identity`, `max_slots`...); both
    sides must state the same. Raises `ConfigError` naming what is unusable."""
    try:
        idle = Idle(idle)
    except ValueError:
        raise ConfigError(f"idle must be one of {', '.join(Idle)}, not {idle!r}") from None
    return EngineConfig(
        hello=make_hello(role, new_boot_nonce(), **{"link_kinds": (link,), **hello}),
        listen=listen,
        connect=connect,
        keys=keys,
        idle=idle,
        wait_for_peer=wait_for_peer,
        rdma=rdma,
        capture=capture,
    )


def open_leader(config: EngineConfig | None = None, **options: Any) -> Leader:
    """The draft side, embedded in this process: from a `config`, or from the options of `configure`."""
    return Leader(_config(Role.LEADER, config, options))


def open_receiver(config: EngineConfig | None = None, **options: Any) -> Receiver:
    """The target side, embedded in this process: from a `config`, or from the options of `configure`."""
    chosen = _config(Role.RECEIVER, config, options)
    if chosen.hello.group_size != 1:
        raise ConfigError(f"group_size {chosen.hello.group_size} needs a daemon a rank: an embedded receiver is a group of one")
    return Receiver(chosen)


def _config(role: Role, config: EngineConfig | None, options: dict[str, Any]) -> EngineConfig:
    if config is None:
        return configure(role, **options)
    if options:
        raise ConfigError(f"give a config or options, not both: {', '.join(options)}")
    if config.hello.role is not role:
        raise ConfigError(f"this needs a {role} HELLO, not a {config.hello.role}'s")
    return config


__all__ = ["configure", "open_leader", "open_receiver"]

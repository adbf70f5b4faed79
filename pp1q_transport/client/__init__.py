"""What draft and target processes call, beside a daemon or with the engine embedded in the caller's own process.

`attach_leader` and `attach_receiver` beside a daemon, `open_leader` and `open_receiver` embedded; the same types come of both.
SPEC section 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..engine import EngineConfig, Idle, new_boot_nonce
from ..errors import ConfigError
from ..session.negotiate import Role, make_hello
from .attached_draft import AttachedLeader
from .attached_target import AttachedReceiver
from .draft import Leader
from .draft_side import DraftSide, Step
from .proposal import Proposal, Q, Ticket
from .target import Receiver
from .target_side import TargetSide

if TYPE_CHECKING:
    from pathlib import Path

    from ..keys import KeyConfig


def configure(
    role: Role,
    *,
    listen: str | None = None,
    connect: str | None = None,
    keys: KeyConfig | None = None,
    idle: Idle | str = Idle.BLOCK,
    wait_for_peer: bool = True,
    link: str = "tcp",
    **hello: object,
) -> EngineConfig:
    """The configuration of one side. `link` is "tcp" or, where both sides are on one host, "shm". `hello` are fields of HELLO
    (`vocab_size`, `depth`, `support`, `draft_identity`, `target_identity`, `max_slots`...); both sides must state the same.
    Raises `ConfigError` naming what is unusable."""
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


def attach_leader(path: str | Path, *, idle: Idle | str = "block") -> AttachedLeader:
    """The draft side beside a leader daemon, at its Unix socket. Raises `ConfigError` when no daemon is there or it does not
    admit this process; later losses are waited out."""
    return AttachedLeader(path, str(getattr(idle, "value", idle)))


def attach_receiver(path: str | Path, rank: int = 0, *, idle: Idle | str = "block") -> AttachedReceiver:
    """The target side of `rank` beside its receiver daemon, at its Unix socket. Errors as for `attach_leader`."""
    return AttachedReceiver(path, rank, str(getattr(idle, "value", idle)))


def _config(role: Role, config: EngineConfig | None, options: dict[str, Any]) -> EngineConfig:
    if config is None:
        return configure(role, **options)
    if options:
        raise ConfigError(f"give a config or options, not both: {', '.join(options)}")
    if config.hello.role is not role:
        raise ConfigError(f"this needs a {role} HELLO, not a {config.hello.role}'s")
    return config


__all__ = [
    "AttachedLeader",
    "AttachedReceiver",
    "DraftSide",
    "TargetSide",
    "attach_leader",
    "attach_receiver",
    "EngineConfig",
    "Idle",
    "Leader",
    "Proposal",
    "Q",
    "Receiver",
    "Role",
    "Step",
    "Ticket",
    "configure",
    "make_hello",
    "new_boot_nonce",
    "open_leader",
    "open_receiver",
]

"""What draft and target processes call: the engine embedded in the caller's own process.

`open_leader` for the draft side, `open_receiver` for the target side. SPEC section 9.
"""

from __future__ import annotations

from ..engine import EngineConfig, Idle, new_boot_nonce
from ..errors import ConfigError
from ..session.negotiate import Role, make_hello
from .draft import Leader, Step
from .target import Proposal, Q, Receiver, Ticket


def open_leader(config: EngineConfig) -> Leader:
    """The draft side, embedded in this process. `config.hello` must be a leader's."""
    if config.hello.role.value != "leader":
        raise ConfigError("open_leader needs a leader's HELLO")
    return Leader(config)


def open_receiver(config: EngineConfig) -> Receiver:
    """The target side, embedded in this process. `config.hello` must be a receiver's."""
    if config.hello.role.value != "receiver":
        raise ConfigError("open_receiver needs a receiver's HELLO")
    return Receiver(config)


__all__ = [
    "EngineConfig",
    "Idle",
    "Leader",
    "Proposal",
    "Q",
    "Receiver",
    "Role",
    "Step",
    "Ticket",
    "make_hello",
    "new_boot_nonce",
    "open_leader",
    "open_receiver",
]

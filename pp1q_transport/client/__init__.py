"""What draft and target processes call, beside a daemon or with the engine embedded in the caller's own process.

`attach_leader`, `attach_draft_peer` and `attach_receiver` beside a daemon, `open_leader` and `open_receiver` embedded; the same
types come of both. Names are loaded on first use: a process beside a daemon needs neither the engine nor ZeroMQ. SPEC section 9.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from ..engine import EngineConfig, Idle, new_boot_nonce
    from ..session.negotiate import Role, make_hello
    from .attached_draft import AttachedLeader
    from .attached_peer import AttachedDraftPeer, PeerStep
    from .attached_target import AttachedReceiver
    from .draft import Leader
    from .draft_side import DraftSide, Step
    from .opening import configure, open_leader, open_receiver
    from .proposal import Proposal, Q, Ticket
    from .target import Receiver
    from .target_side import TargetSide

_PACKAGE = __name__.rpartition(".")[0]
_HOMES = {
    "AttachedDraftPeer": "client.attached_peer",
    "AttachedLeader": "client.attached_draft",
    "AttachedReceiver": "client.attached_target",
    "DraftSide": "client.draft_side",
    "EngineConfig": "engine",
    "Idle": "engine",
    "Leader": "client.draft",
    "PeerStep": "client.attached_peer",
    "Proposal": "client.proposal",
    "Q": "client.proposal",
    "Receiver": "client.target",
    "Role": "session.negotiate",
    "Step": "client.draft_side",
    "TargetSide": "client.target_side",
    "Ticket": "client.proposal",
    "configure": "client.opening",
    "make_hello": "session.negotiate",
    "new_boot_nonce": "engine",
    "open_leader": "client.opening",
    "open_receiver": "client.opening",
}


def attach_leader(path: str | Path, *, idle: Idle | str = "block") -> AttachedLeader:
    """The draft side beside a leader daemon, at its Unix socket. Raises `ConfigError` when no daemon is there or it does not
    admit this process; later losses are waited out."""
    from .attached_draft import AttachedLeader

    return AttachedLeader(path, str(getattr(idle, "value", idle)))


def attach_draft_peer(path: str | Path, rank: int, *, idle: Idle | str = "block") -> AttachedDraftPeer:
    """A rank above 0 of a tensor-parallel draft beside its daemon, at its Unix socket. Errors as for `attach_leader`."""
    from .attached_peer import AttachedDraftPeer

    return AttachedDraftPeer(path, rank, str(getattr(idle, "value", idle)))


def attach_receiver(path: str | Path, rank: int = 0, *, idle: Idle | str = "block") -> AttachedReceiver:
    """The target side of `rank` beside its receiver daemon, at its Unix socket. Errors as for `attach_leader`."""
    from .attached_target import AttachedReceiver

    return AttachedReceiver(path, rank, str(getattr(idle, "value", idle)))


__all__ = [
    "AttachedDraftPeer",
    "AttachedLeader",
    "AttachedReceiver",
    "DraftSide",
    "TargetSide",
    "attach_draft_peer",
    "attach_leader",
    "attach_receiver",
    "EngineConfig",
    "Idle",
    "Leader",
    "PeerStep",
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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{_PACKAGE}.{home}"), name)

"""The transport of an exact proposal distribution q from a draft model to its verifier.

`open_leader` and `open_receiver` are what processes call; they are loaded on first use, so that importing a part (`dyadic`,
`rng`, `errors`) costs only that part.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Leader, Proposal, Receiver, Step, Ticket, open_leader, open_receiver
    from .errors import InvalidQ, LocalMisuse, PeerFault, ProposalDiscarded, Reason, Refused
    from .keys import connector_keys, listener_keys

_HOMES = {
    "Leader": "client",
    "Proposal": "client",
    "Receiver": "client",
    "Step": "client",
    "Ticket": "client",
    "attach_draft_peer": "client",
    "attach_leader": "client",
    "attach_receiver": "client",
    "open_leader": "client",
    "open_receiver": "client",
    "InvalidQ": "errors",
    "LocalMisuse": "errors",
    "PeerFault": "errors",
    "ProposalDiscarded": "errors",
    "Reason": "errors",
    "Refused": "errors",
    "connector_keys": "keys",
    "listener_keys": "keys",
}

__all__ = [
    "InvalidQ",
    "Leader",
    "LocalMisuse",
    "PeerFault",
    "Proposal",
    "ProposalDiscarded",
    "Reason",
    "Receiver",
    "Refused",
    "Step",
    "Ticket",
    "attach_draft_peer",
    "attach_leader",
    "attach_receiver",
    "connector_keys",
    "listener_keys",
    "open_leader",
    "open_receiver",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)

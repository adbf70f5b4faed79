"""The terms of a session out of what two HELLOs agreed on.

Between `negotiate`, which agrees, and whoever lays out memory or builds a session machine by it. Decides nothing. SPEC section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import hello as hello_fields
from .terms import SessionTerms

if TYPE_CHECKING:
    from .hello import Hello
    from .negotiate import Agreement


def terms_of(agreement: Agreement) -> SessionTerms:
    """The numbers of an agreement that both session machines run by. On a group link the coordinator, which sends the rows,
    stands where the leader does on others."""
    ours, theirs = agreement.ours, agreement.theirs
    leader, receiver = (ours, theirs) if ours.role.sends_rows else (theirs, ours)
    return _terms(ours, agreement.session, leader.boot_nonce, receiver.boot_nonce)


def terms_ahead(hello: Hello) -> SessionTerms:
    """The terms of the sessions that a HELLO can form, for its sizes alone: no session, no nonces."""
    return _terms(hello, 0, 0, 0)


def _terms(hello: Hello, session: int, leader_nonce: int, receiver_nonce: int) -> SessionTerms:
    first_id, end_id = hello_fields.held_range(hello)
    return SessionTerms(
        session=session,
        leader_nonce=leader_nonce,
        receiver_nonce=receiver_nonce,
        vocab_size=hello.vocab_size,
        depth=hello.depth,
        support=hello.support,
        max_slots=hello.max_slots,
        dense="dense" in hello.representations,
        sparse="sparse" in hello.representations,
        draw_proof=hello.draw_proof,
        max_context_tokens=hello.max_context_tokens,
        shard=hello.rank if end_id - first_id < hello.vocab_size else 0,
        first_id=first_id,
        end_id=end_id,
    )

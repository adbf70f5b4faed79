"""Exchanges between a target process and the group: records to parts and back.

Between a port, which knows its rank and whether an epoch is open, and the sessions of the group links (`group_exchanges`,
`member`). The process is not trusted: what it says is judged as another rank's word is, and one that breaks a rule is cut off,
which ends the epoch. SPEC sections 4 and 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import LocalMisuse, PeerFault, Reason
from ..local import messages as m
from ..session.parts import Part, values_in

if TYPE_CHECKING:
    from collections.abc import Callable


def take_part(fields: tuple[Any, ...], payload: memoryview, rank: int, own: Callable[[Part], None]) -> None:
    """An EXCHANGE record of the open epoch, handed on. Raises `PeerFault`: also `rank_disagree` for one out of turn."""
    request, _epoch, sequence, generation, round_number, position, purpose, first_id, end_id, said_by, _count = fields
    if said_by != rank:
        raise PeerFault(Reason.RANK_DISAGREE, f"a part of rank {said_by} by the process of rank {rank}")
    values = values_in(purpose, bytes(payload))
    part = Part(rank, sequence, request, generation, round_number, position, purpose, first_id, end_id, values)
    try:
        own(part)
    except LocalMisuse as error:
        raise PeerFault(Reason.RANK_DISAGREE, str(error)) from error


def tell_parts(send: Callable[..., None], epoch: int, exchanges: list[list[Part]]) -> None:
    """Every part of every complete exchange as an EXCHANGED record, in the order of ranks; takes them out of the list."""
    for parts in exchanges:
        for part in parts:
            payload = part.values.tobytes()
            send(m.EXCHANGED, *part.record(epoch, len(payload)), payload=payload)
    exchanges.clear()

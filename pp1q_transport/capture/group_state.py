"""Where the group of a rank stands: epoch, votes, claims and who holds a slot, as a map that a fresh one can be primed from.

Between `snapshot`, which puts the map into a capture's state records, and `group_replay`, which primes by it. Checks every number
before it is used: a capture may come from anybody. SPEC section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ..errors import LocalMisuse, PeerFault
from ..session.claims import Claims
from ..session.group import MAX_RANKS, Coordinator, Fate, Phase, Proposal
from ..session.group_member import Ballot, Member, Paper, Standing
from ..session.hub import HubSession, RankGroup
from ..session.member import MemberSession
from ..session.own_link import OwnLinkSession, OwnMemberSession
from ..session.receiver import ReceiverSession
from ..session.shards import Claim
from .pcapng import CaptureError

if TYPE_CHECKING:
    from ..session.machine import SessionMachine

RANK_0: Final = "rank 0"
MEMBER: Final = "member"
_U32: Final = (1 << 32) - 1
_U64: Final = (1 << 64) - 1


# ---- kept ------------------------------------------------------------------------------------------------------------


def group_state(session: SessionMachine) -> dict[str, object] | None:
    """The group of this session's rank as it stands; None for a session of no group. `running`: of a group link, after `up`."""
    if isinstance(session, HubSession):
        running = session.group.hubs.get(session.rank) is session
        return {"at": RANK_0, "running": running, "rank": session.rank, **_rank_0(session.group)}
    if isinstance(session, MemberSession):
        kept = {"at": MEMBER, "running": session.member.up, "member": _member(session.member)}
        return kept | ({"owners": _pairs(session.owners)} if isinstance(session, OwnMemberSession) else {})
    if isinstance(session, OwnLinkSession):
        return {"at": MEMBER, "asked": _pairs(session.asked)}
    if isinstance(session, ReceiverSession) and session.group is not None:
        return {"at": RANK_0, **_rank_0(session.group)}
    return None


def _rank_0(group: RankGroup) -> dict[str, object]:
    coordinator = group.coordinator
    return {
        "epoch": coordinator.epoch,
        "phase": int(coordinator.phase),
        "up": sorted(coordinator.up),
        "floor": coordinator.floor,
        "answers": [[rank, *digest, floor] for rank, (digest, floor) in coordinator.answers.items()],
        "proposals": [
            [p.slot, p.generation, p.epoch, p.holders, p.fate.value, p.code, _pairs(p.votes)]
            for p in coordinator.proposals.values()
        ],
        "claims": [
            [
                slot,
                claims.generation,
                claims.owner,
                claims.depth,
                [[rank, claim.pack().hex()] for rank, claim in claims.rows.items()],
            ]
            for slot, claims in group.claims.items()
        ],
    }


def _member(member: Member) -> dict[str, object]:
    return {
        "coordinator": member.coordinator,
        "epoch": member.epoch,
        "least": member.least,
        "standing": member.standing.value,
        "papers": [[p.slot, p.generation, p.epoch, p.ballot.value, p.code, p.returned] for p in member.papers.values()],
    }


def _pairs(kept: dict[int, int]) -> list[list[int]]:
    return [[key, value] for key, value in kept.items()]


# ---- primed ----------------------------------------------------------------------------------------------------------


def prime_rank_0(group: RankGroup, said: dict[str, Any]) -> None:
    """Brings a fresh group to where the live one stood. Raises `CaptureError`."""
    try:
        _prime_coordinator(group.coordinator, said)
        for slot, generation, owner, depth, rows in _list(said, "claims", 5):
            claims = Claims(_number(generation), _number(owner), _number(depth))
            for rank, packed in _tuples(rows, 2):
                data = bytes.fromhex(packed)
                claims.rows[_number(rank)] = Claim.unpack(data, len(data))
            group.claims[_number(slot)] = claims
    except (ValueError, TypeError, LocalMisuse, PeerFault) as error:
        raise CaptureError(f"a group's state that can't be: {str(error)[:200]}") from None


def _prime_coordinator(coordinator: Coordinator, said: dict[str, Any]) -> None:
    phase = Phase(_number(said.get("phase")))
    coordinator.epoch = _number(said.get("epoch"))
    coordinator.floor = _number(said.get("floor"))
    coordinator.up = {_number(rank, MAX_RANKS) for rank in said.get("up", ())}
    if phase is not Phase.GATHERING:
        coordinator.phase = Phase.ASKING  # the answers open it, if they did
        for rank, low, high, floor in _list(said, "answers", 4):
            coordinator.agreed(_number(rank), coordinator.epoch, (_number(low, _U64), _number(high, _U64)), _number(floor))
        if coordinator.phase is not phase:
            raise ValueError(f"an epoch that is {phase.name.lower()} by answers that do not make it so")
    # Behind the answers: an answer gives back what its rank held.
    for slot, generation, epoch, holders, fate, code, votes in _list(said, "proposals", 7):
        proposal = Proposal(_number(epoch), _number(slot), _number(generation), _number(holders), Fate(fate), _number(code))
        proposal.votes = dict(_numbers(votes))
        coordinator.proposals[proposal.slot] = proposal


def prime_member(member: Member, said: object) -> None:
    """Brings a member to where the live one stood, its link not yet up. Raises `CaptureError`."""
    if not isinstance(said, dict):
        raise CaptureError("a member's state that is no JSON object")
    try:
        member.coordinator = _number(said.get("coordinator"), _U64)
        member.epoch = _number(said.get("epoch"))
        member.least = _number(said.get("least"))
        member.standing = Standing(said.get("standing"))
        member.papers.clear()
        for slot, generation, epoch, ballot, code, returned in _list(said, "papers", 6):
            paper = Paper(_number(epoch), _number(slot), _number(generation), Ballot(ballot), _number(code), returned is True)
            member.papers[paper.slot] = paper
    except (ValueError, TypeError) as error:
        raise CaptureError(f"a member's state that can't be: {str(error)[:200]}") from None


def prime_pairs(target: dict[int, int], said: dict[str, Any], name: str) -> None:
    """A map of slots to numbers. Raises `CaptureError`."""
    try:
        target.update(_numbers(said.get(name)))
    except (ValueError, TypeError):
        raise CaptureError(f"{name} of a group's state that can't be") from None


def _list(said: dict[str, Any], name: str, width: int) -> list[list[Any]]:
    return _tuples(said.get(name), width)


def _tuples(found: object, width: int) -> list[list[Any]]:
    if (
        not isinstance(found, list)
        or len(found) > 65_536
        or any(not isinstance(each, list) or len(each) != width for each in found)
    ):
        raise ValueError("a list that is none")
    return found


def _numbers(found: object) -> list[tuple[int, int]]:
    return [(_number(key), _number(value)) for key, value in _tuples(found, 2)]


def _number(value: object, most: int = _U32) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is no integer of 0..{most}")
    return value

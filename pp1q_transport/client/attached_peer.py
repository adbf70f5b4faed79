"""A rank above 0 of a tensor-parallel draft, beside its daemon: the STEPs that rank 0 drafts for, and each token that it drew.

Between the part of a draft model that this process computes and the channel of its daemon. Draws nothing and has no random number
generator: rank 0 alone draws. In mode "vocabulary" it puts its own range of each row, in place. SPEC sections 2 (TOKEN), 3 and 9.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Final, NoReturn, cast

import numpy as np

from .._native import kernels
from .._native.kernels import monotonic_ns
from ..errors import ConfigError, InvalidQ, LocalMisuse, ProposalDiscarded, Reason
from ..local import messages as m
from ..local.attach import Role
from ..session.leader import DRAFTING, Grant
from ..session.requests import Request, RequestTable
from ..session.shards import GROUP_MODES, MASS, VOCABULARY, range_of
from ..staging import SlotViews
from . import rows
from .attached import AttachedSide
from .draft_side import Step
from .events import Events, fill_grant

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from ..local.attach import Attachment
    from ..local.handshake import Geometry
    from ..staging import Region
    from .draft_side import DraftSide

LOOK_NS: Final = 50_000_000


class _Followed:
    """One STEP as its process follows it: the tokens told so far, and why there will be no more."""

    def __init__(self, generation: int, request: int, depth: int) -> None:
        self.generation = generation
        self.request = request
        self.depth = depth
        self.tokens: list[int] = []
        self.put = 0
        self.over: Reason | None = None

    @property
    def whole(self) -> bool:
        """Whether every token was told."""
        return len(self.tokens) == self.depth


class _Target:
    """One target of rank 0, as this rank sees it."""

    def __init__(self, index: int, region: Region | None, views: SlotViews | None) -> None:
        self.index = index
        self.region = region
        self.views = views
        self.session = 0
        self.requests = RequestTable()
        self.followed: dict[int, _Followed] = {}  # by slot: its latest STEP
        self.queue: deque[PeerStep] = deque()

    def end(self, followed: _Followed, reason: Reason) -> None:
        """There will be no more of a STEP, nor a place for its rows: it is over, unless this rank is through with it."""
        through = followed.whole and (self.region is None or followed.put == followed.depth)
        if not through and followed.over is None:
            followed.over = reason


class PeerStep(Step):
    """One STEP at a rank above 0. For each position, in order: compute this rank's part of the row, ask for the token that rank 0
    drew, and put this rank's range where the ranks split the vocabulary."""

    def __init__(self, peer: AttachedDraftPeer, grant: Grant, request: Request, target: int, followed: _Followed) -> None:
        super().__init__(cast("DraftSide", peer), grant, request, target)  # what needs a leader is overridden
        self._peer = peer
        self._followed = followed

    @property
    def alive(self) -> bool:
        """False once the proposal was given up: there will be no further token."""
        self._peer.poll()
        return self._followed.over is None

    def token(self, position: int) -> int:
        """The token that rank 0 drew for `position`; waits for it. Raises `ProposalDiscarded` with the reason once there will be
        none: the proposal was given up, or the daemon is gone."""
        index = position - self.anchor - 1
        if not 0 <= index < self.depth:
            raise LocalMisuse(f"position {position} is outside {self.positions}")
        return self._peer.token_of(self, self._followed, index)

    def put(  # type: ignore[override]
        self,
        position: int,
        *,
        counts: npt.NDArray[np.uint32],
        mass_before: int,
        ids: npt.NDArray[np.int32] | None = None,
    ) -> bool:
        """Puts this rank's range of the row of `position`, after its token was told. False when the proposal is dead.

        `counts` are uint32 [end_id - first_id] of the whole row's 2^24, or [n] with `ids` int32 [n], which rise strictly within
        the range (n may be 0); `mass_before` is the sum of the counts of all ranges before it. Raises `InvalidQ` for counts that
        make no range (SPEC section 3).
        """
        return self._peer.put_range(self, self._followed, position, counts, ids, mass_before)

    def fail(self, reason: Reason = Reason.CANCELLED) -> None:
        """This rank can't follow: the proposal is given up on all ranks, with this reason."""
        self._peer.give_up(self, self._followed, reason)

    def begin_copy(self, position: int, device: object, holds: str) -> NoReturn:
        """Raises `LocalMisuse`: rows of a rank above 0 come as counts of its range."""
        raise LocalMisuse("a rank above 0 of a draft has no copy stage: give the counts of its range")


class AttachedDraftPeer(AttachedSide, Events):
    """A draft's rank above 0 beside its daemon. Iterate over it for STEPs; callbacks find a target's index in `event_target`."""

    role = Role.LEADER_DRAFT
    hears = m.DAEMON_TO_DRAFT

    def __init__(self, path: str | Path, rank: int, idle: str = "block", backoff_seed: int | None = None) -> None:
        if rank < 1:
            raise ConfigError(f"rank {rank} of a draft attaches by attach_leader: peers are the ranks above 0")
        Events.__init__(self)
        self._targets: list[_Target] = []
        self._turn = 0
        self._geometry: Geometry | None = None
        self.first_id = 0
        self.end_id = 0
        """[first_id, end_id): this rank's range of the vocabulary where the ranks split it; else all of it."""
        AttachedSide.__init__(self, path, rank, idle, backoff_seed)

    # ---- the daemon's coming and going --------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Whether the daemon has a link to rank 0 for at least one target."""
        return any(target.session for target in self._targets)

    @property
    def splits_vocabulary(self) -> bool:
        """Whether this rank puts its own range of each row."""
        return any(target.region is not None for target in self._targets)

    def _joined(self, attachment: Attachment) -> None:
        shape = self._geometry = attachment.geometry
        mode = GROUP_MODES[shape.group_mode] if shape.group_mode < len(GROUP_MODES) else ""
        self.first_id, self.end_id = range_of(mode, shape.vocab_size, shape.group_size, shape.rank)
        regions: list[Region | None] = [*attachment.regions]
        if len(regions) != (shape.targets if mode == VOCABULARY else 0):
            raise ConfigError(f"the daemon passes {len(regions)} regions for {shape.targets} targets")
        self._targets = []
        for index in range(shape.targets):
            region = regions[index] if regions else None
            views = None if region is None else SlotViews(region, shape.slots(), self.end_id - self.first_id, writable=True)
            self._targets.append(_Target(index, region, views))

    def _after_join(self) -> None:
        """A rank has nothing to say until it is asked."""

    def _parted(self) -> None:
        for target in self._targets:
            self._end(target, Reason.PEER_LOST)
            if target.region is not None:
                target.region.close()
                target.region = target.views = None

    def _end(self, target: _Target, reason: Reason) -> None:
        target.session = 0
        target.queue.clear()
        for followed in target.followed.values():
            target.end(followed, reason)
        target.followed.clear()
        requests = list(target.requests.requests)
        target.requests.end_session()
        for request in requests:
            self.tell("reset", request, reason, target.index)

    # ---- records ------------------------------------------------------------------------------------------------

    def _record(self, kind: int, fields: tuple[int, ...], payload: memoryview) -> None:
        if kind == m.TOKEN:
            followed = self._targets[fields[0]].followed.get(fields[1])
            if followed is not None and followed.generation == fields[2]:
                followed.tokens.append(fields[4])
        elif kind == m.STEP_FOR_DRAFT:
            self._step(fields)
        elif kind == m.COMMITTED_TOKENS:
            target, tokens = self._targets[fields[1]], array("i", payload.cast("i"))
            request = target.requests.get(fields[0])
            if request is not None:
                request.extend(tokens)
                self.tell("commit", fields[0], tokens, target.index)
        elif kind == m.OPENED:
            number, seed, index, max_position, generation, _count = fields
            tokens = array("i", payload.cast("i"))
            self._targets[index].requests.add(Request(number, seed, tokens, max_position, generation))
            self.tell("open", number, tokens, index)
        elif kind == m.RESET:
            self._reset(fields)
        elif kind == m.CLOSED:
            self._targets[fields[1]].requests.remove(fields[0])
            self.tell("close", fields[0], None, fields[1])
        elif kind == m.TARGET_UP:
            self._targets[fields[0]].session = fields[2]
        elif kind == m.TARGET_DOWN:
            self._end(self._targets[fields[0]], Reason.from_code(fields[1]))

    def _step(self, fields: tuple[int, ...]) -> None:
        target = self._targets[fields[6]]
        request = target.requests.get(fields[0])
        if request is None:
            return
        grant = Grant(fields[7], 0)
        fill_grant(grant, fields)
        grant.state = DRAFTING
        before = target.followed.get(grant.slot)
        if before is not None:
            target.end(before, Reason.GENERATION_STALE)
        followed = target.followed[grant.slot] = _Followed(grant.generation, grant.request, grant.depth)
        target.queue.append(PeerStep(self, grant, request, target.index, followed))

    def _reset(self, fields: tuple[int, ...]) -> None:
        number, index, code, slot, generation = fields
        target, reason = self._targets[index], Reason.from_code(code)
        followed = target.followed.get(slot)
        if followed is not None and followed.generation == generation and followed.over is None:
            followed.over = reason
        self.tell("reset", number, reason, target.index)

    # ---- STEPs --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[PeerStep]:
        """STEPs as they come, across reconnects; ends when this side is closed."""
        while not self._closed:
            step = self.next_step()
            if step is not None:
                yield step

    def next_step(self, timeout_ns: int = LOOK_NS) -> PeerStep | None:
        """The next live STEP, waiting at most `timeout_ns`. Targets take turns."""
        if not any(target.queue for target in self._targets):
            self.serve(monotonic_ns() + timeout_ns)
        return self.take_step()

    def take_step(self) -> PeerStep | None:
        """The next live STEP of those that came already. Serves nothing."""
        count = len(self._targets)
        for look in range(count):
            target = self._targets[(self._turn + look) % count]
            while target.queue:
                step = target.queue.popleft()
                if step._followed.over is None:
                    self._turn = target.index + 1
                    return step
        return None

    def token_of(self, step: PeerStep, followed: _Followed, index: int) -> int:
        """See `PeerStep.token`."""
        while True:
            if followed.over is not None:
                raise ProposalDiscarded(followed.over, step.request, step.round)
            if index < len(followed.tokens):
                return followed.tokens[index]
            if self._closed:
                raise LocalMisuse("this side is closed")
            self.serve(monotonic_ns() + LOOK_NS)

    def give_up(self, step: PeerStep, followed: _Followed, reason: Reason) -> None:
        """See `PeerStep.fail`."""
        self.poll()
        target = self._targets[step.target]
        if target.followed.get(step.slot) is not followed:
            return  # its slot has moved on, perhaps in another session: what is there now is not this step's
        behind = followed.put < followed.depth and target.region is not None
        if followed.over is None and (behind or not followed.whole):
            followed.over = reason
            self.send(m.FAIL, target.session, step.target, step.slot, step.slot_generation, reason.code)
            self.ring()

    # ---- ranges of rows -----------------------------------------------------------------------------------------

    def put_range(
        self,
        step: PeerStep,
        followed: _Followed,
        position: int,
        counts: npt.NDArray[np.uint32],
        ids: npt.NDArray[np.int32] | None,
        mass_before: int,
    ) -> bool:
        """See `PeerStep.put`."""
        self.poll()
        if followed.over is not None or not self.attached:
            return False
        target = self._targets[step.target]
        if target.region is None or target.views is None:
            raise LocalMisuse("this draft's rank 0 sends whole rows: there is no range to put")
        if target.followed.get(step.slot) is not followed:
            return False  # its slot has moved on
        index = position - step.anchor - 1
        if index != followed.put:
            raise LocalMisuse(f"position {position} out of order: the next one is {step.anchor + 1 + followed.put}")
        if index >= len(followed.tokens):
            raise LocalMisuse(f"position {position} has no token yet: ask for it before the range is put")
        if (ids is None) != (step.support is None):
            raise LocalMisuse("ids belong to the counts of a sparse row, and to no other")
        entries, length = self._write(target.views, target.region, step, index, counts, ids)
        mass = int(counts.sum(dtype=np.uint64))
        if not 0 <= mass_before <= MASS - mass:
            raise InvalidQ(Reason.MASS, f"{mass} counts behind {mass_before} exceed 2^24")
        place = (step.target, step.slot, step.slot_generation, position)
        sent = self.send(m.PUT_SHARD, target.session, *place, entries, length, mass, mass_before)
        followed.put += sent
        self.ring()
        return sent

    def _write(
        self,
        views: SlotViews,
        region: Region,
        step: PeerStep,
        row: int,
        counts: npt.NDArray[np.uint32],
        ids: npt.NDArray[np.int32] | None,
    ) -> tuple[int, int]:
        """Writes a range into its slot. Returns (entries, bytes)."""
        size = self.end_id - self.first_id
        at = views.geometry.row_offset(step.slot, row)
        if ids is None:
            assert self._geometry is not None
            rows.shaped(counts, np.uint32, size, "counts")
            try:
                kernels.counts_to_q(counts, region.memory, at)
            except ValueError as error:
                raise InvalidQ(Reason.MASS, str(error)) from error
            length = self._geometry.dense_row_bytes
            region.array[at + 4 * size : at + length] = 0
            return size, length
        assert step.support is not None
        rows.sparse_part(ids, counts, step.support, (self.first_id, self.end_id))
        if len(ids):
            view_ids, view_q = views.sparse(step.slot, row, len(ids))
            view_ids[:] = ids
            view_q[:] = counts / np.float64(1 << 24)
        return len(ids), 8 * len(ids)

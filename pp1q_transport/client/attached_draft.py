"""The draft side beside a daemon: STEPs as records, q written in place into the daemon's staging memory.

Between a draft model's loop and the channel of its leader daemon, for all the targets that the daemon serves: in turn, so that
one with many requests does not keep the others waiting. No payload byte passes through here. SPEC sections 2, 3, 5 and 9.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING, Final

from .._native.kernels import monotonic_ns
from ..errors import Reason
from ..local import messages as m
from ..local.attach import Role
from ..session.leader import DEAD, DRAFTING, SENT, Grant
from ..session.requests import Request, RequestTable
from ..staging import SlotViews
from .attached import AttachedSide
from .draft_side import DraftSide, Staging, Step
from .events import fill_grant

if TYPE_CHECKING:
    from pathlib import Path

    from ..local.attach import Attachment


# Small rows that come faster than this one after another share a wake-up of the daemon: a bell costs both processes more than a
# ready-made row. A draft that computes its rows is slower and rings for each, as one with rows of many bytes does.
ROWS_APART_NS: Final = 250_000
ROWS_TOGETHER_BYTES: Final = 1 << 16
ROWS_AFTER_BELL: Final = 2  # are put while the daemon wakes up: it is there when the last one is


class _Target:
    """One target of the daemon, as its draft sees it."""

    def __init__(self, index: int, staging: Staging, slots: int, depth: int) -> None:
        self.index = index
        self.staging = staging
        self.session = 0
        self.depth = depth
        self.requests = RequestTable()
        self.grants = [Grant(slot, depth) for slot in range(slots)]
        self.queue: deque[tuple[Grant, int]] = deque()

    def end(self) -> list[int]:
        """The session is over: every grant is dead, every request closed. Returns the requests there were."""
        self.session = 0
        self.queue.clear()
        for grant in self.grants:
            if grant.state == DRAFTING:
                grant.state = DEAD
        # A Step of this session may be held still, and a receiver that comes back counts its slot's generations from 1 again.
        self.grants = [Grant(grant.slot, self.depth) for grant in self.grants]
        requests = list(self.requests.requests)
        self.requests.end_session()
        return requests


class AttachedLeader(AttachedSide, DraftSide):
    """The draft side beside its daemon. Iterate over it for STEPs; callbacks find the target's index in `event_target`."""

    role = Role.LEADER_DRAFT
    hears = m.DAEMON_TO_DRAFT

    def __init__(self, path: str | Path, idle: str = "block", backoff_seed: int | None = None, rank: int = 0) -> None:
        DraftSide.__init__(self)
        self._targets: list[_Target] = []
        self._turn = 0
        self._unrung_bytes = 0  # of rows whose bell is still to come
        self._put_ns = 0  # when the last row was put, or the last STEP taken up
        AttachedSide.__init__(self, path, rank, idle, backoff_seed)

    # ---- the daemon's coming and going --------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """Whether the daemon has a session with at least one target."""
        return any(target.session for target in self._targets)

    @property
    def over(self) -> bool:
        """See `DraftSide.over`."""
        return self._closed

    def _joined(self, attachment: Attachment) -> None:
        shape = attachment.geometry
        geometry = shape.slots()
        self._targets = []
        for index, region in enumerate(attachment.regions):
            views = SlotViews(region, geometry, shape.vocab_size, writable=True)
            staging = Staging(region, views, shape.dense_row_bytes)
            self._targets.append(_Target(index, staging, shape.max_slots, shape.depth))
        self._map(attachment.regions)

    def _after_join(self) -> None:
        """A draft has nothing to say until it is asked."""

    def _parted(self) -> None:
        self._unmap(touched=False)
        for target in self._targets:
            self._end(target, Reason.PEER_LOST)

    def _end(self, target: _Target, reason: Reason) -> None:
        for request in target.end():
            self.tell("reset", request, reason, target.index)

    # ---- records ------------------------------------------------------------------------------------------------

    def _record(self, kind: int, fields: tuple[int, ...], payload: memoryview) -> None:
        if kind == m.STEP_FOR_DRAFT:
            self._step(fields)
        elif kind == m.COMMITTED_TOKENS:
            self._committed(fields[0], self._targets[fields[1]], array("i", payload.cast("i")))
        elif kind == m.OPENED:
            request, seed, index, max_position, generation, _count = fields
            tokens = array("i", payload.cast("i"))
            self._targets[index].requests.add(Request(request, seed, tokens, max_position, generation))
            self.tell("open", request, tokens, index)
        elif kind == m.RESET:
            self._reset(fields[0], self._targets[fields[1]], Reason.from_code(fields[2]))
        elif kind == m.CLOSED:
            self._targets[fields[1]].requests.remove(fields[0])
            self.tell("close", fields[0], None, fields[1])
        elif kind == m.TARGET_UP:
            self._targets[fields[0]].session = fields[2]
        elif kind == m.TARGET_DOWN:
            self._end(self._targets[fields[0]], Reason.from_code(fields[1]))

    def _committed(self, number: int, target: _Target, tokens: array[int]) -> None:
        request = target.requests.get(number)
        if request is not None:
            request.extend(tokens)
            self.tell("commit", number, tokens, target.index)

    def _reset(self, number: int, target: _Target, reason: Reason) -> None:
        for grant in target.grants:
            if grant.request == number and grant.state == DRAFTING:
                grant.state = DEAD
        self.tell("reset", number, reason, target.index)

    def _step(self, fields: tuple[int, ...]) -> None:
        target = self._targets[fields[6]]
        grant = target.grants[fields[7]]
        fill_grant(grant, fields)
        grant.rows = 0
        grant.state = DRAFTING
        target.queue.append((grant, grant.generation))

    # ---- what the draft asks for --------------------------------------------------------------------------------

    def next_step(self, timeout_ns: int = 50_000_000) -> Step | None:
        """See `DraftSide.next_step`. Targets take turns."""
        if not any(target.queue for target in self._targets):
            self.serve(monotonic_ns() + timeout_ns)
        return self.take_step()

    def take_step(self) -> Step | None:
        """See `DraftSide.take_step`."""
        count = len(self._targets)
        for look in range(count):
            target = self._targets[(self._turn + look) % count]
            while target.queue:
                grant, generation = target.queue.popleft()
                request = target.requests.get(grant.request)
                if grant.alive(generation) and request is not None:
                    self._turn = target.index + 1
                    self._put_ns = monotonic_ns()
                    return Step(self, grant, request, target.index)
        return None

    def drafting(self, grant: Grant, target: int = 0) -> bool:
        """See `DraftSide.drafting`."""
        self.poll()
        return self.attached and grant.state == DRAFTING and self._is_current(grant, target)

    def _is_current(self, grant: Grant, target: int) -> bool:
        return target < len(self._targets) and self._targets[target].grants[grant.slot] is grant

    def staging_of(self, target: int) -> Staging | None:
        """See `DraftSide.staging_of`."""
        self.poll()
        return self._targets[target].staging if self.attached and self._targets[target].session else None

    def send_row(self, grant: Grant, step: Step, position: int, token: int, entries: int, offset: int, length: int) -> bool:
        """See `DraftSide.send_row`."""
        if not self._is_current(grant, step.target):
            return False  # of a daemon that is gone: another one's slots have this number now
        session, slot = self._targets[step.target].session, grant.slot
        if not self.send(m.PUT, session, step.target, slot, step.slot_generation, position, token, entries, length, 0):
            return False
        grant.rows += 1
        self._unrung_bytes += length
        left = grant.depth - grant.rows
        few = self._unrung_bytes < ROWS_TOGETHER_BYTES and monotonic_ns() - self._put_ns < ROWS_APART_NS
        if left == 0:
            grant.state = SENT
        elif few and left != ROWS_AFTER_BELL:
            self._put_ns = monotonic_ns()
            return True
        self._unrung_bytes = 0
        self.ring()
        self._put_ns = monotonic_ns()  # after the bell, which may take longer than a row
        return True

    def fail(self, grant: Grant, generation: int, reason: Reason, target: int = 0) -> None:
        """See `Step.fail`."""
        if grant.alive(generation) and self._is_current(grant, target):
            grant.state = DEAD
            self.send(m.FAIL, self._targets[target].session, target, grant.slot, generation, reason.code)
            self.ring()

    def close(self) -> None:
        """See `AttachedSide.close`."""
        self._close_copies()
        super().close()

"""What the ranks of a target compute together, through their daemons: the collectives of `sharding` as frames of the group.

Between an engine's call of a `sharding` generator and the records of its daemon. The process waits in it as it waits for a
proposal: until every rank has spoken or the epoch is over. SPEC sections 4, 6 and 7.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Final, TypeVar

from .. import wire
from .._native.kernels import monotonic_ns
from ..errors import InvalidQ, PeerFault, ProposalDiscarded, Reason
from ..local import messages as m
from ..session.exchange_run import ExchangeRun, Place
from ..session.parts import Part, values_in
from ..session.shards import ranges
from ..sharding import Shard, shards_of
from .attached import AttachedSide

if TYPE_CHECKING:
    from ..session.requests import Request
    from ..sharding import Steps

T = TypeVar("T")
LOOK_NS: Final = 50_000_000


class Exchanging(AttachedSide):
    """The part of an attached target that exchanges. `epoch` and `between_epochs` are the receiver's."""

    epoch: int

    def __init__(self) -> None:
        self._heard: list[Part] = []  # of the exchange we wait for, by rank
        self._said = 0  # parts of ours in this epoch

    @property
    @abstractmethod
    def between_epochs(self) -> bool:
        """Whether this rank must agree with the others before anything goes on."""

    @abstractmethod
    def limit(self, name: str) -> int:
        """One of the session's terms."""

    def forget_exchanges(self) -> None:
        """An epoch opens or is over: exchanges count from 0."""
        self._heard.clear()
        self._said = 0

    def shard(self) -> Shard:
        """This rank's range of the vocabulary as mode "vocabulary" splits it; an engine may split its logits otherwise."""
        vocab_size, size = self.limit("vocab_size"), self.limit("group_size")
        return shards_of([first for first, _ in ranges(vocab_size, size)] + [vocab_size])[self.rank]

    def run_sharded(
        self, steps: Steps[T], request: Request, round: int, *, generation: int | None = None, shard: Shard | None = None
    ) -> T:
        """Runs one rank's side of a computation of `sharding` with the other ranks of the group; returns what it returns.

        Every rank calls it for the same request and round, in the same order, with a generator over its own `shard` (by default
        the range of mode "vocabulary"); for a proposal, pass its `round` and `generation`. Raises `ProposalDiscarded(peer_lost)`
        with `epoch_over` when a rank is lost meanwhile: then nothing of it may be committed. What the generator raises on every
        rank alike (`InvalidQ`) goes through; after anything else this rank leaves its group, since the others wait for its part.
        """
        # Rank 0 alone counts generations: without a proposal the ranks know no common one.
        place = Place(request.request, generation or 0, round, request.anchor)
        split = self.shard() if shard is None else shard
        if self.limit("group_size") == 1:
            return self._alone(steps, place, split)
        run = ExchangeRun(steps, self.rank, place, split.first_id, split.end_id)
        epoch = self.epoch
        try:
            self._check_epoch(place, epoch)
            part = run.begin(self._said)
            while part is not None:
                self._say(part, epoch)
                part = run.resume(self._hear(place, epoch), self._said)
        except (InvalidQ, ProposalDiscarded):
            raise
        except BaseException:
            self._lose(Reason.CANCELLED)
            raise
        return run.result

    def _alone(self, steps: Steps[T], place: Place, shard: Shard) -> T:
        """A group of one answers itself."""
        run = ExchangeRun(steps, 0, place, shard.first_id, shard.end_id)
        part = run.begin(0)
        while part is not None:
            part = run.resume([part], 0)
        return run.result

    def _check_epoch(self, place: Place, epoch: int) -> None:
        if not self.up or self.epoch != epoch:
            raise ProposalDiscarded(Reason.PEER_LOST, place.request, place.round, epoch_over=True)

    def _say(self, part: Part, epoch: int) -> None:
        if part.sequence > wire.U32_MAX:  # this epoch has no numbers left: it ends by this, and the next counts from 0
            self._lose(Reason.GENERATION_EXHAUSTED)
            return
        payload = part.values.tobytes()
        self._said += 1
        self.send(m.EXCHANGE, *part.record(epoch, len(payload)), payload=payload)
        self.ring()

    def _hear(self, place: Place, epoch: int) -> list[Part]:
        """The parts of all ranks. There is no time limit but the epoch's: a rank that is slow is waited for, one that dies ends
        it."""
        self._check_epoch(place, epoch)
        while len(self._heard) < self.limit("group_size"):
            self.serve(monotonic_ns() + LOOK_NS)
            self._check_epoch(place, epoch)
        parts = self._heard[:]
        self._heard.clear()
        return parts

    def exchanged(self, fields: tuple[int, ...], payload: memoryview) -> None:
        """An EXCHANGED record. Raises `PeerFault` for one that does not follow from what we said."""
        request, epoch, sequence, generation, round, position, purpose, first_id, end_id, rank, _count = fields
        if epoch != self.epoch & wire.U32_MAX or self.between_epochs:
            return  # of an epoch that this process knows to be over
        if sequence != self._said - 1 or rank != len(self._heard):
            raise PeerFault(Reason.RANK_DISAGREE, f"rank {rank} of exchange {sequence}, we said {self._said}")
        values = values_in(purpose, bytes(payload))
        part = Part(rank, sequence, request, generation, round, position, purpose, first_id, end_id, values)
        if self._heard and (part.place, purpose) != (self._heard[0].place, self._heard[0].purpose):
            raise PeerFault(Reason.REQUEST_MISMATCH, f"rank {rank} of exchange {sequence} is about something else")
        self._heard.append(part)

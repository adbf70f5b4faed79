"""Ranks of a group in threads of the test's own process, honest but for the one frame that a case bends or says by hand.

Between the cases of this folder and a live daemon of another rank. Sessions, links and machines are the package's own, as a
daemon puts them together, so that nothing but the one rule is broken.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import evil_peer as e
import numpy as np
from daemon_rig import WATCHDOG_S, Bed
from protocol.frames import Bend
from protocol.group_rig import MemberRig

from pp1q_transport import dyadic, rng, wire
from pp1q_transport.client.agreement import state_digest
from pp1q_transport.counters import Counters
from pp1q_transport.daemon.config import parse
from pp1q_transport.daemon.grouping import GroupLinks
from pp1q_transport.daemon.leading_group import ServedGroup
from pp1q_transport.daemon.owning import OwnRank
from pp1q_transport.daemon.served import ServedReceiver
from pp1q_transport.engine import EngineConfig, new_boot_nonce, terms_ahead
from pp1q_transport.errors import ProposalDiscarded, Reason
from pp1q_transport.session.leader import Grant
from pp1q_transport.session.own_link import OwnLinkSession
from pp1q_transport.session.requests import Request
from pp1q_transport.session.slots import Slot

SUPPORT = 8


class RankFrame(NamedTuple):
    """What a rank does that breaks a rule: a frame of kind `on` bent (the `nth`), or one said by hand (`fields`) while a proposal
    is under way. `cost`: "link" ends the epoch too, "proposal" is void on every rank and nothing else is lost."""

    number: str
    title: str
    reason: Reason
    on: int
    bend: Bend | None = None
    nth: int = 0
    mode: str = "replicate"
    owner: int = 0
    cost: str = "link"
    slot: int = 0
    generation: int = 0
    epoch: int = 0
    fields: dict[str, int] = {}


class RankBender(e.Bender):
    """A bender of the frames on a group link, some of which name no request."""

    def arm(self, case: Any, victim: int) -> None:
        """See `Bender.arm`."""
        super().arm(case, victim if case.on in (wire.GRANT, wire.REPLY, wire.COMPLETION) else 0)


class InThread:
    """A rank that is served in a thread; `do` has it do something there."""

    def __init__(self) -> None:
        self.faults: list[BaseException] = []
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                if not self._todo.empty():  # one at a time: what the session sends of it goes first
                    self._todo.get()()
                self.serve()
                self._ending.wait(0.0005)
        except BaseException as fault:  # noqa: BLE001 - the test sees it at the end
            self.faults.append(fault)

    def serve(self) -> None:
        """One pass."""
        raise NotImplementedError

    def do(self, act: Callable[[], None]) -> None:
        """Does it between two passes, and waits for that."""
        done = threading.Event()

        def once() -> None:
            act()
            done.set()

        self._todo.put(once)
        assert done.wait(WATCHDOG_S), self.faults

    def stop(self) -> None:
        """Ends the thread."""
        self._ending.set()
        self._thread.join(WATCHDOG_S)
        assert not self.faults, self.faults


class EvilRank0(InThread):
    """Rank 0: an honest receiver of the bed's leader, and the coordinator of its group."""

    def __init__(self, bed: Bed) -> None:
        super().__init__()
        config = parse(bed.config("receiver0").read_text(encoding="utf-8"), str(bed.config("receiver0")))
        nonce = new_boot_nonce()
        peer, group = config.peers[0], config.group
        self.bender = RankBender()
        self.receiver = ServedReceiver(EngineConfig(hello=config.hello(peer, nonce), connect=peer.connect, stubborn=True))
        self.receiver.prepare(terms_ahead(config.hello(peer, nonce)))
        hello = config.group_hello(nonce)
        self.links = GroupLinks(
            EngineConfig(hello=hello, listen=group.listen, wrap_outbox=self.bender.attach, stubborn=True), Counters()
        )
        self.group = self.receiver.group = self.links.group
        self.bender.terms = lambda: self.group.hubs[1].terms if 1 in self.group.hubs else None
        self._thread.start()

    def serve(self) -> None:
        """See `InThread.serve`."""
        self.receiver.serve_once()
        self.links.serve()
        if self.group.asking:
            self.group.agree(*state_digest({}))
        self.links.flush()

    def ready_to_step(self) -> bool:
        """Whether the epoch is open and the leader is there."""
        return self.group.open and self.receiver.session is not None

    def step(self, number: int, owner: int) -> Any:
        """A STEP of a new request; its ticket."""
        tickets: list[Any] = []

        def act() -> None:
            request = Request(number, 1, e.PROMPT, 1 << 20)
            request.owner = owner
            self.receiver.requests.add(request)
            self.receiver.announce(request)
            tickets.append(self.receiver.ask(request, 3, 1.0, SUPPORT, 0, e.LONG_US, 0))

        self.do(act)
        return tickets[0]

    def say(self, case: RankFrame, slot: int, generation: int) -> None:
        """One frame by hand, as rank 0 says it of that slot."""

        def act() -> None:
            terms, epoch = self.group.hubs[1].terms, self.group.epoch + case.epoch
            values = {"slot": slot + case.slot, "slot_generation": generation + case.generation, "epoch": epoch}
            if case.on == wire.EPOCH:
                values = {"epoch": epoch}
            elif case.on not in (wire.DECIDE, wire.VOTE):
                values = {}
            named: Any = type("Named", (), {"terms": terms})()
            raw = MemberRig.frame(named, "hub", case.on, **(values | case.fields)).encode(terms.leader_nonce)
            self.bender.outbox.raw(raw, 0, len(raw))

        self.do(act)

    def close(self) -> None:
        """Ends it."""
        self.stop()
        self.links.close()
        self.receiver.close()


class EvilOwnMember(InThread):
    """Rank 1 with a link of its own to the bed's leader."""

    def __init__(self, bed: Bed) -> None:
        super().__init__()
        config = parse(bed.config("receiver1").read_text(encoding="utf-8"), str(bed.config("receiver1")))
        nonce = new_boot_nonce()
        self.bender = RankBender()
        peer = config.peers[0]
        self.rank = OwnRank(
            EngineConfig(
                hello=config.group_hello(nonce), connect=config.group.connect, wrap_outbox=self.bender.attach, stubborn=True
            ),
            EngineConfig(hello=config.hello(peer, nonce), connect=peer.connect, stubborn=True),
            Counters(),
        )
        self.bender.terms = lambda: self.rank.session.terms if self.rank.session is not None else None
        self._thread.start()

    def open(self, number: int) -> None:
        """Opens a request, as its process would."""
        own = self.rank.own

        def act() -> None:
            request = Request(number, 1, e.PROMPT, 1 << 20)
            own.requests.add(request)
            own.announce(request)

        self.do(act)

    def serve(self) -> None:
        """See `InThread.serve`."""
        rank, own = self.rank, self.rank.own
        rank.serve()
        rank.collect()
        group = rank.joint.group
        if group is None:
            return
        if group.asking:
            group.agree(*state_digest({}))
        for number, slot in list(group.pending.items()):
            request, session = own.requests.get(number), own.session
            if request is not None and isinstance(session, OwnLinkSession) and own.knows(number):
                session.step_granted(slot, request, slot.depth, 1.0, slot.support, slot.representation, 0, 0)
        rank.flush()

    def release(self, slot: int, generation: int) -> None:
        """Gives a slot back, as its consumer would."""
        self.do(lambda: self.rank.release(self.rank.table.slots[slot], generation))

    def close(self) -> None:
        """Ends it."""
        self.stop()
        self.rank.close()


class EvilShardLeader(InThread):
    """A leader of both ranks of a vocabulary in shards, with an honest draft; the bender stands before rank 1."""

    def __init__(self, bed: Bed) -> None:
        super().__init__()
        config = parse(bed.config("leader").read_text(encoding="utf-8"), str(bed.config("leader")))
        nonce = new_boot_nonce()
        self.bender = e.Bender()
        (peers,) = config.targets()
        configs = [
            EngineConfig(hello=config.hello(peer, nonce), listen=peer.listen, stubborn=True,
                         wrap_outbox=self.bender.attach if config.hello(peer, nonce).rank == 1 else None)
            for peer in peers
        ]  # fmt: skip
        self.leader = ServedGroup(configs, [peer.name for peer in peers], 0)
        for tell in (self.leader.on_open, self.leader.on_commit, self.leader.on_reset, self.leader.on_close):
            tell(lambda *_said: None)
        links = self.leader.links
        self.bender.terms = lambda: links[1].session.terms if links[1].session is not None else None
        self._thread.start()

    def serve(self) -> None:
        """See `InThread.serve`."""
        for engine in self.leader.engines:
            engine.poll()
        for grant in self.leader.take_grants():
            self._draft(grant)
        self.leader.flush()

    def _draft(self, grant: Grant) -> None:
        vocab = self.leader.group.terms.vocab_size
        for row, position in enumerate(range(grant.anchor + 1, grant.anchor + 1 + grant.depth)):
            counts = dyadic.allocate(np.array([(7 * i + 13 * position + i * i) % 11 for i in range(vocab)], np.float64))
            u24 = rng.draw24(grant.seed, rng.Domain.PROPOSAL, grant.request_generation, grant.round, position)
            q = dyadic.to_q(counts).tobytes()
            memory, at = self.leader.row_place(grant.slot, row)
            memoryview(memory)[at : at + len(q)] = q
            token = dyadic.draw(counts, u24)
            self.leader.group.put_row(grant, grant.generation, position, token, vocab, memory, at, len(q))

    def close(self) -> None:
        """Ends it."""
        self.stop()
        self.leader.close()


def outcome_of(ticket: Any) -> Reason | None:
    """Of an attached target's ticket: why its proposal is void, None when it was ready; given back at once."""
    try:
        ticket.wait().release()
    except ProposalDiscarded as discarded:
        return discarded.reason
    return None


def landing(rank: EvilRank0) -> Slot | None:
    """The slot of a proposal that is under way at rank 0."""
    table = rank.group.table
    assert table is not None
    return next((slot for slot in table.slots if slot.state in (1, 2, 5)), None)



"""The rdma link: rows by WRITE_WITH_IMM into landing memory, everything else by SEND, one byte stream to the assembler in order.

Between an engine and one `RdmaConnection`. The peer can write landing memory at any time, so nothing is judged or read in place:
bytes are copied out to where the assembler wants them, and that copy, which no peer can reach, is digested and validated while it
is hot. A row takes one message, header and payload together; a fence revokes the slot's key. SPEC 4, DESIGN decision 5.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from .._native.kernels import copy_bytes, monotonic_ns
from .._native.net import POLLIN, wait_io
from ..errors import ConfigError, PeerFault, Reason
from ..logs import logger
from ..wire import HEADER_BYTES
from .rdma_connection import HEADS_BYTES, Phase, RdmaConnection
from .rdma_cutting import Cutter
from .rdma_records import HEAD_BYTES, KEY, KEYS_AT_MOST, decode_head, encode_head
from .rdma_status import event_words, explain
from .rdma_window import (
    ACKNOWLEDGEMENTS,
    NUMBER_BITS,
    LandingTargets,
    ReceiveAccount,
    SendWindow,
    Sent,
    pack_immediate,
    unpack_immediate,
)
from .stream import StreamLink

if TYPE_CHECKING:
    from ..memory import ReadMemory
    from ..session.assembler import FrameSink
    from ..session.outbox import Outbox, Piece
    from .rdma_records import Head

BATCH: Final = 32
BATCHES_A_PUMP: Final = 4
COPY_AT_MOST: Final = 1 << 17  # validated while it is still in the second-level cache
LOOK_EVERY_NS: Final = 1_000_000  # while nothing moves, the peer's life costs a system call this often
FINISH_WITHIN_NS: Final = 200_000_000  # at the end: for what was sent last to arrive
FRUITLESS_AT_MOST: Final = 3  # queue pairs made in a row without one message taken either way
FLUSHED: Final = 5  # IBV_WC_WR_FLUSH_ERR: posted behind the error, says nothing itself
_NUMBERS: Final = (1 << NUMBER_BITS) - 1


class RdmaLink(StreamLink):
    """One proven, joined peer. Owns `connection`."""

    def __init__(self, connection: RdmaConnection, sink: FrameSink, outbox: Outbox) -> None:
        super().__init__("rdma", connection.sock, sink, outbox)
        assert connection.up, "a link over queue pairs that are not joined"
        peer = connection.peer
        assert peer is not None
        self.fd = connection.fileno()
        self.connection = connection
        self.window = SendWindow(min(connection.limit, peer.queue_depth))
        self.account = ReceiveAccount(self.window.limit)
        self.targets = LandingTargets(peer.shape, list(peer.places))
        self.rows_lost = 0
        self.sent_again = 0
        self._message_bytes = min(connection.buffer_bytes, peer.receive_bytes)
        self._on_the_way: deque[Sent] = deque()
        self._again: deque[bytes] = deque()
        self._keys: dict[int, int] = {}
        self._cutter = Cutter()
        self._seen: list[Any] = []  # completions found when preparing to sleep
        self._back = 0  # receives of a failed queue pair that came back
        self._acknowledged = 0
        self._looked_ns = monotonic_ns()
        self._fruitless = 0
        self._log = logger(link="rdma")

    # ---- the pump -----------------------------------------------------------------------------------------------

    def pump(self, now_ns: int) -> int:
        """See `Link.pump`. Received bytes carry the time of their own copy. A queue pair in error is made anew here."""
        if self.broken:
            return -self.broken
        try:
            return self._pump()
        except PeerFault as fault:
            return self._end(fault.reason, fault.detail)
        except ConfigError as error:  # memory that can't be registered
            return self._end(Reason.LINK_ERROR, str(error))

    def _pump(self) -> int:
        moved = self._receive()
        if self.broken:
            return -self.broken
        if self.connection.phase is not Phase.UP:
            self._mend()
            return moved
        moved += self._send()
        if moved == 0:
            return self._idle()
        return moved

    def _end(self, reason: Reason, detail: str) -> int:
        if not self.broken:
            self.broken = reason.code
            if reason is not Reason.PEER_LOST:
                self._log.warning("rdma_link_ends", reason=reason.value, detail=detail)
        return -self.broken

    def _idle(self) -> int:
        """Nothing moved: whether the peer is still there, now and then."""
        connection = self.connection
        now_ns = monotonic_ns()
        if not connection.gone:
            if now_ns < self._looked_ns + LOOK_EVERY_NS:
                return 0
            self._looked_ns = now_ns
            connection.poll(now_ns)
            self._hear_device()
            if connection.gone:  # what it sent before it left is in the queue already
                return self._receive()
            return 0
        return self._end(Reason.PEER_LOST, "")

    # ---- receiving ----------------------------------------------------------------------------------------------

    def _receive(self) -> int:
        total = 0
        connection = self.connection
        if connection.phase not in (Phase.UP, Phase.FAILED):
            return 0  # what came already waits until the counts are those of the new queue pair
        pair = connection.pair
        for _batch in range(BATCHES_A_PUMP):
            done = self._seen or pair.received(BATCH)
            self._seen = []
            for completion in done:
                if completion.status:
                    self._back += 1
                    self._break(completion)
                    continue
                total += self._take(completion)
                if self.broken:
                    self.bytes_in += total
                    return total
            if len(done) < BATCH:
                break
        self.bytes_in += total
        return total

    def _take(self, completion: Any) -> int:
        """One message: its stream bytes go to the assembler, then its receive is posted again. Returns how many they were."""
        connection = self.connection
        index: int = completion.wr_id
        length: int = completion.byte_len
        asks = False
        if completion.opcode == connection.pair.row_received:
            slot, row, number = unpack_immediate(completion.imm_data)
            shape = connection.shape
            if slot >= shape.slots or row >= shape.rows or length > shape.stride:
                raise PeerFault(Reason.SLOT_BOUNDS, f"a row of {length} bytes for landing row {row} of slot {slot}")
            self._in_order(number, self.account.taken & _NUMBERS)
            self._feed(connection.landing.view, shape.offset(slot, row), length, True)
        else:
            at = index * connection.buffer_bytes
            head = decode_head(connection.work.view[at : at + length])
            self._believe(head)
            if not head.counted:
                self._give_back(index)
                return 0
            self._in_order(head.number, self.account.taken & 0xFFFFFFFF)
            asks = head.asks
            length -= head.start
            self._feed(connection.work.view, at + head.start, length, False)
        self._give_back(index)
        self.account.take(asks)
        self._fruitless = 0
        return length

    def _give_back(self, index: int) -> None:
        """A receive is free: posted again, unless its queue pair is over."""
        if self.connection.phase is Phase.UP:
            self.connection.post_receive(index)
        else:
            self._back += 1

    def _believe(self, head: Head) -> None:
        """What a head says besides: how much of ours was taken, and new keys."""
        if self.window.report(head.taken):
            self._fruitless = 0
            while self._on_the_way and self._on_the_way[0].number < self.window.taken:
                self._on_the_way.popleft()
        for slot, key in head.keys:
            self.targets.rekey(slot, key)

    def _in_order(self, number: int, expected: int) -> None:
        if number != expected:
            raise PeerFault(Reason.LINK_ERROR, f"message {number} where {expected} was next")

    def _feed(self, memory: memoryview, offset: int, length: int, is_row: bool) -> None:
        """Copies out what arrived, piece by piece to where the assembler wants it; a row's header alone first."""
        assembler = self.assembler
        most = HEADER_BYTES if is_row else COPY_AT_MOST
        while length:
            assembler.want()
            piece = min(length, assembler.length, most)
            copy_bytes(assembler.memory, assembler.offset, memory, offset, piece)
            offset += piece
            length -= piece
            most = COPY_AT_MOST
            code = assembler.received(piece, monotonic_ns())
            if code:
                self.broken = code
                return

    # ---- sending ----------------------------------------------------------------------------------------------

    def _send(self) -> int:
        total = 0
        pair = self.connection.pair
        # The send queue has room for a whole window twice, but completions are seen later than the peer's reports.
        while self.window.room > 0 and pair.unfinished < pair.sends - ACKNOWLEDGEMENTS:
            if len(self._keys) > KEYS_AT_MOST or (self._keys and self._again):
                self._send_message(b"")  # a message that is sent again has no room for keys
                continue
            if self._again:
                self._send_message(self._again.popleft())
                continue
            piece = self.outbox.front()
            if piece is None:
                break
            sent = self._send_piece(piece)
            if sent == 0:
                break
            self.outbox.sent(sent)
            total += sent
        if self._keys and self.window.room > 0:
            self._send_message(b"")
        if self.account.due:
            self._acknowledge()
        if pair.unfinished:
            self._finish()
        self.bytes_out += total
        return total

    def _finish(self) -> None:
        pair = self.connection.pair
        while True:
            done = pair.finished(BATCH)
            for completion in done:
                if completion.status:
                    self._break(completion)
            if len(done) < BATCH:
                return

    def _send_piece(self, piece: Piece) -> int:
        """As much of a piece as one message takes: a whole row, or a run of other bytes. Returns how many; 0: not now."""
        room = self._message_bytes - HEAD_BYTES - len(self._keys) * KEY.size
        slot, length = self._cutter.cut(self.outbox.buffer, piece, room, self.targets)
        if slot >= 0:
            return self._send_row(piece, slot, length)
        self._send_message(self._bytes_of(piece, length))
        self._cutter.gone(length)
        return length

    def _bytes_of(self, piece: Piece, length: int) -> bytes:
        """The first `length` bytes of a piece: its head, then its memory."""
        first = min(length, piece.head_length)
        data = bytes(memoryview(self.outbox.buffer)[piece.head_offset : piece.head_offset + first])
        if length > first:
            data += bytes(memoryview(piece.memory)[piece.offset : piece.offset + length - first])
        return data

    def _send_message(self, data: bytes, asks: bool = False) -> None:
        connection = self.connection
        keys = [self._keys.popitem() for _ in range(min(len(self._keys), KEYS_AT_MOST))]
        number = self.window.next()
        head = encode_head(number, self.account.report(), True, asks, keys)
        at = self._buffer(number)
        end = at + len(head) + len(data)
        connection.work.view[at:end] = head + data
        if asks:
            self.window.ask(number)
        self._on_the_way.append(Sent(number, False, at + len(head), len(data)))
        connection.pair.post_send([(connection.work.address + at, end - at, connection.work_key)])

    def _buffer(self, number: int) -> int:
        """Where the send buffer of a message lies; free, since the message that had it before was taken."""
        connection = self.connection
        return connection.sends_at + number % connection.limit * connection.buffer_bytes

    def _send_row(self, piece: Piece, slot: int, length: int) -> int:
        """One WRITE_WITH_IMM: a small row as a copy, of a large one the header as a copy and the payload where it lies."""
        connection, window = self.connection, self.window
        row = self.targets.free_row(slot, window.taken)
        if row < 0:
            self._ask()
            return 0
        small = length <= connection.buffer_bytes
        region = None
        if not small:
            region = connection.staged(piece.memory, window.sent, window.taken)
            if region is None:
                self._ask()
                return 0
        number = window.next()
        at = self._buffer(number)
        copied = length if small else HEADER_BYTES
        connection.work.view[at : at + copied] = self._bytes_of(piece, copied)
        gathered = [(connection.work.address + at, copied, connection.work_key)]
        if region is not None:
            start = piece.offset + HEADER_BYTES - piece.head_length
            gathered.append((region.address + start, length - HEADER_BYTES, region.lkey))
        address, key = self.targets.use(slot, row, number)
        self._on_the_way.append(Sent(number, True, at, 0))
        connection.pair.post_row(gathered, address, key, pack_immediate(slot, row, number))
        return length

    def _ask(self) -> None:
        """Something waits for the peer to say what it has taken."""
        if self.window.may_ask():
            self._send_message(b"", asks=True)

    def _acknowledge(self) -> None:
        """A report with nothing to go along with. It takes no credit: see `rdma_window`."""
        connection = self.connection
        at = connection.heads_at + self._acknowledged % ACKNOWLEDGEMENTS * HEADS_BYTES
        self._acknowledged += 1
        connection.work.view[at : at + HEAD_BYTES] = encode_head(0, self.account.report(), False, False, [])
        connection.pair.post_send([(connection.work.address + at, HEAD_BYTES, connection.work_key)])

    # ---- a queue pair in error ----------------------------------------------------------------------------------

    def _break(self, completion: Any) -> None:
        """The queue pair met an error: it stops, what is posted comes back, and `_mend` makes the next one. The first completion
        may be of work behind the one that failed, whose own says why."""
        connection = self.connection
        if connection.phase is not Phase.UP:
            return
        causes = [completion, *connection.pair.finished(BATCH)]
        cause = next((item for item in causes if item.status not in (0, FLUSHED)), completion)
        problem = explain(cause.status)
        connection.counters.add("queue_pair_errors")
        # Flushed and nothing else: the other end met the error and says which.
        log = self._log.info if cause.status == FLUSHED else self._log.warning
        log(
            "queue_pair_error", reason=problem.reason.value, status=cause.status, words=problem.words,
            vendor_error=cause.vendor_err, queue_pair=connection.pair.number,
        )  # fmt: skip
        self._hear_device()
        connection.fail()

    def _hear_device(self) -> None:
        """What the device says by itself, such as that a write was refused, which nothing else tells the end it was aimed at."""
        for number in self.connection.device.events():
            words = event_words(number)
            self.connection.counters.add(f"rdma_event_{words.partition(':')[0].lower()}")
            self._log.info("rdma_event", words=words)

    def _mend(self) -> None:
        """One step towards the next queue pair: all receives are back, both ends have told each other, frames move again."""
        connection, now_ns = self.connection, monotonic_ns()
        connection.poll(now_ns)
        if connection.phase is Phase.FAILED:
            if connection.gone:
                raise PeerFault(Reason.PEER_LOST, "")
            if self._back >= connection.receives:
                self._fruitless += 1
                if self._fruitless > FRUITLESS_AT_MOST:
                    raise PeerFault(Reason.LINK_ERROR, f"{FRUITLESS_AT_MOST} queue pairs in a row moved nothing")
                self._back = 0
                self._keys.clear()  # the peer hears of all keys with the queue pair
                connection.begin(self.account.taken & 0xFFFFFFFF)
            elif connection.overdue(now_ns):
                raise PeerFault(Reason.LINK_ERROR, "the receives of a failed queue pair did not come back")
        if connection.up:
            self._resume()

    def _resume(self) -> None:
        """A new queue pair is up. What the peer did not take: rows are lost (their proposals become `incomplete`), the rest of
        the stream is sent again, since its order must have no gap. Both are counted and said."""
        connection = self.connection
        peer = connection.peer
        assert peer is not None
        before = self.window.taken
        self.window.restart(peer.taken, min(connection.limit, peer.queue_depth))
        if self.window.taken > before:
            self._fruitless = 0
        lost, again = 0, deque[bytes]()
        for sent in self._on_the_way:
            if sent.number < self.window.taken:
                continue
            lost += sent.is_row
            if sent.length:
                again.append(bytes(connection.work.view[sent.offset : sent.offset + sent.length]))
        self._on_the_way.clear()
        self.sent_again += len(again)
        self._again = again + self._again
        self.account.restart(self.window.limit)
        self.targets.restart(list(peer.places))
        self.rows_lost += lost
        counters = connection.counters
        counters.add("queue_pairs_made_anew")
        counters.add("rows_lost_with_queue_pair", lost)
        counters.add("messages_sent_again", len(again))
        self._log.info("queue_pair_made_anew", rows_lost=lost, sent_again=len(again), **connection.describe())

    # ---- sleeping -----------------------------------------------------------------------------------------------

    def wait(self, timeout_ns: int, other_fd: int) -> None:
        """See `Link.wait`."""
        if not self.broken and self.rest() >= 0:
            ready = wait_io(self.fd, POLLIN, other_fd, POLLIN, timeout_ns)
            self.rise(bool(ready & 1))

    def rest(self) -> int:
        """See `Link.rest`."""
        if self.broken or self._seen or self.connection.gone:
            return -1
        if self.connection.phase in (Phase.UP, Phase.FAILED):
            pair = self.connection.pair
            pair.arm()
            self._seen = pair.received(BATCH)
            if self._seen:
                return -1
        return 1

    def rise(self, ready: bool) -> None:
        """See `Link.rise`."""
        if ready and not self.broken:
            self.connection.pair.take_event()
            self._looked_ns = 0

    def watch(self) -> list[tuple[int, int]]:
        """See `Link.watch`: one descriptor that stands for the socket and the completion channel."""
        return [(self.fd, POLLIN)]

    # ---- fences and the end -------------------------------------------------------------------------------------

    def fence(self, slot: int) -> bool:
        """See `Link.fence`. Revokes the slot's key; the new one goes to the peer before anything that is sent from now on. Raises
        `PeerFault` only when the device refuses even to stop the queue pair."""
        landed = self.assembler.landing.abandon(slot)
        connection = self.connection
        if self.fd >= 0 and slot < connection.shape.slots:
            try:
                self._keys[slot] = connection.fence(slot)
            except PeerFault as fault:
                self._end(fault.reason, fault.detail)
                if connection.phase is not Phase.FAILED:
                    raise
        return landed

    def stage(self, memory: ReadMemory) -> None:
        """See `Link.stage`: registers it, before a row's budget runs."""
        if self.targets.shape.slots:
            try:
                self.connection.staged(memory, -1, 0)
            except ConfigError as error:
                self._end(Reason.LINK_ERROR, str(error))
                raise PeerFault(Reason.LINK_ERROR, str(error)) from None

    def say_last(self, frame: ReadMemory) -> bool:
        """See `Link.say_last`."""
        if self.broken or not self.connection.up or self._again or self.window.room <= 0:
            return False
        self._send_message(bytes(frame))
        return True

    def linger(self, timeout_ns: int) -> None:
        """See `Link.linger`: until the peer's device has all that was sent. It stays readable there after our end."""
        connection = self.connection
        stop_ns = monotonic_ns() + timeout_ns
        if connection.domain.foreign:
            return
        while connection.up and not connection.gone and connection.pair.unfinished and monotonic_ns() < stop_ns:
            self._finish()

    def describe(self) -> dict[str, object]:
        """See `Link.describe`."""
        return {
            "link": "rdma",
            **self.connection.describe(),
            "rows_lost": self.rows_lost,
            "sent_again": self.sent_again,
        }

    def close(self) -> None:
        """See `Link.close`. Waits a moment for what was sent last to arrive; nothing can land once this returns."""
        if self.fd >= 0:
            if not self.broken:
                self.linger(FINISH_WITHIN_NS)
            self.fd = -1
            self.connection.close()
        if not self.broken:
            self.broken = Reason.LINK_ERROR.code

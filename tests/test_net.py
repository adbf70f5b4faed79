"""The socket calls of the hot path: what they answer, and that no range outside the buffer reaches the kernel."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pp1q_transport._native import net

pytestmark = pytest.mark.timeout(30)
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def tcp_pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def fill(sock: socket.socket) -> int:
    """Sends until the kernel takes no more; the number of bytes it took."""
    block, taken = bytes(65536), 0
    while (moved := net.send_from(sock.fileno(), block, 0, len(block), False)) > 0:
        taken += moved
    assert moved == net.AGAIN
    return taken


def test_a_receive_lands_at_its_offset_and_nowhere_else(pair: Pair) -> None:
    ours, theirs = pair
    mem = bytearray(b"." * 16)
    theirs.sendall(b"abcdef")
    assert net.recv_into(ours.fileno(), mem, 5, 4) == 4
    assert mem == b"....." + b"abcd" + b"." * 7
    assert net.recv_into(ours.fileno(), mem, 0, 16) == 2
    assert mem[:2] == b"ef"


@pytest.mark.parametrize("length", (8, 16383, 16384, 100_000), ids=lambda n: f"{n}_bytes")
def test_an_empty_socket_says_again_on_both_sides_of_the_gil_threshold(pair: Pair, length: int) -> None:
    mem = np.zeros(length, np.uint8)
    assert net.recv_into(pair[0].fileno(), mem, 0, length) == -errno.EAGAIN == net.AGAIN


def test_end_of_stream_is_zero_and_only_after_the_last_byte(pair: Pair) -> None:
    ours, theirs = pair
    mem = bytearray(8)
    theirs.sendall(b"xyz")
    theirs.close()
    assert [net.recv_into(ours.fileno(), mem, 0, 8) for _ in range(2)] == [3, 0]


def test_a_lost_peer_is_an_errno_and_no_signal(tcp_pair: Pair) -> None:
    ours, theirs = tcp_pair
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close sends a reset
    theirs.close()
    assert net.wait_io(ours.fileno(), net.POLLIN, -1, 0, 10**10) == net.READY_A
    assert net.recv_into(ours.fileno(), bytearray(1), 0, 1) == -errno.ECONNRESET
    # SIGPIPE is ignored by Python anyway; its default action here would end the test run.
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        assert net.send_from(ours.fileno(), b"x", 0, 1, False) == -errno.EPIPE
        assert net.send_two(ours.fileno(), b"x", 0, 1, b"", 0, 0) == -errno.EPIPE
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_a_full_socket_says_again_and_every_byte_taken_arrives(pair: Pair) -> None:
    ours, theirs = pair
    taken = fill(ours)
    assert net.send_from(ours.fileno(), b"x", 0, 1, False) == net.AGAIN
    assert net.send_two(ours.fileno(), b"x", 0, 1, b"y", 0, 1) == net.AGAIN
    ours.close()
    mem, landed = bytearray(65536), 0
    while (moved := net.recv_into(theirs.fileno(), mem, 0, len(mem))) > 0:
        landed += moved
    assert (moved, landed) == (0, taken)


def test_two_pieces_arrive_in_order(pair: Pair) -> None:
    ours, theirs = pair
    assert net.send_two(ours.fileno(), b"..head..", 2, 4, b"payload", 3, 4) == 8
    assert theirs.recv(100) == b"headload"
    assert net.send_two(ours.fileno(), b"head", 0, 4, b"", 0, 0) == 4
    assert theirs.recv(100) == b"head"


def test_two_large_pieces_may_go_in_part_and_never_out_of_order(pair: Pair) -> None:
    ours, theirs = pair
    head, payload = os.urandom(64), os.urandom(8_000_000)
    taken = net.send_two(ours.fileno(), head, 0, len(head), payload, 0, len(payload))
    assert 64 < taken < len(head) + len(payload)
    ours.close()
    arrived = b"".join(iter(lambda: theirs.recv(1 << 20), b""))
    assert arrived == (head + payload)[:taken]


def test_more_holds_a_small_piece_back_until_the_next(tcp_pair: Pair) -> None:
    ours, theirs = tcp_pair
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    assert net.send_from(ours.fileno(), b"head", 0, 4, True) == 4
    assert net.send_from(ours.fileno(), b"load", 0, 4, False) == 4
    assert net.wait_io(theirs.fileno(), net.POLLIN, -1, 0, 10**10) == net.READY_A
    # One segment: whoever sees the first byte sees all of them.
    assert theirs.recv(100) == b"headload"


BAD_RANGES = (
    ("negative_offset", -1, 1),
    ("negative_length", 0, -1),
    ("nothing", 0, 0),
    ("one_past", 0, 9),
    ("offset_at_end", 8, 1),
    ("straddles", 7, 2),
    ("offset_overflows", 2**63 - 1, 1),
    ("length_overflows", 1, 2**63 - 1),
)


@pytest.mark.parametrize(("offset", "length"), [c[1:] for c in BAD_RANGES], ids=[c[0] for c in BAD_RANGES])
def test_a_range_outside_the_buffer_reaches_no_socket(pair: Pair, offset: int, length: int) -> None:
    ours, theirs = pair
    theirs.sendall(b"wait")
    mem = bytearray(8)
    with pytest.raises(ValueError, match="do not lie within a buffer of 8 bytes"):
        net.recv_into(ours.fileno(), mem, offset, length)
    with pytest.raises(ValueError, match="do not lie within"):
        net.send_from(ours.fileno(), mem, offset, length, False)
    with pytest.raises(ValueError, match="do not lie within"):
        net.send_two(ours.fileno(), mem, offset, length, mem, 0, 1)
    if length:
        with pytest.raises(ValueError, match="do not lie within"):
            net.send_two(ours.fileno(), mem, 0, 1, mem, offset, length)
    assert mem == bytes(8)
    assert net.recv_into(ours.fileno(), mem, 0, 8) == 4  # nothing was consumed
    assert net.recv_into(theirs.fileno(), mem, 0, 8) == net.AGAIN  # and nothing was sent


@given(st.binary(max_size=64), st.integers(-70, 70), st.integers(-70, 70))
def test_what_is_sent_is_exactly_the_slice_or_an_error(data: bytes, offset: int, length: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if offset >= 0 and length >= 1 and offset + length <= len(data):
            assert net.send_from(ours.fileno(), data, offset, length, False) == length
            landed = bytearray(len(data))
            assert net.recv_into(theirs.fileno(), landed, offset, length) == length
            assert landed[offset : offset + length] == data[offset : offset + length]
            assert not any(landed[:offset])
            assert not any(landed[offset + length :])
        else:
            with pytest.raises(ValueError, match="do not lie within"):
                net.send_from(ours.fileno(), data, offset, length, False)


def test_memory_that_is_no_writable_row_of_bytes_is_refused(pair: Pair) -> None:
    fd = pair[0].fileno()
    for mem in (b"readonly", np.zeros(8, np.float32), np.zeros((2, 4), np.uint8), np.zeros(16, np.uint8)[::2]):
        with pytest.raises((ValueError, BufferError)):
            net.recv_into(fd, mem, 0, 4)


def test_a_closed_descriptor_is_an_errno(pair: Pair) -> None:
    fd = os.dup(pair[0].fileno())
    os.close(fd)
    assert net.recv_into(fd, bytearray(4), 0, 4) == -errno.EBADF
    assert net.send_from(fd, b"four", 0, 4, False) == -errno.EBADF
    assert net.wait_io(fd, net.POLLIN, pair[1].fileno(), net.POLLOUT, 0) == -errno.EBADF


def test_wait_names_the_ready_side(pair: Pair) -> None:
    ours, theirs = pair
    a, b = ours.fileno(), theirs.fileno()
    assert net.wait_io(a, net.POLLIN, b, net.POLLIN, 0) == 0
    assert net.wait_io(a, net.POLLIN, b, net.POLLIN, -5) == 0  # a deadline already over only looks
    ours.send(b"x")
    assert net.wait_io(a, net.POLLIN, b, net.POLLIN, 10**10) == net.READY_B
    assert net.wait_io(b, net.POLLIN, -1, 0, 10**10) == net.READY_A
    theirs.send(b"x")
    assert net.wait_io(a, net.POLLIN, b, net.POLLIN, 10**10) == net.READY_A | net.READY_B
    assert net.wait_io(-1, 0, -1, 0, 0) == 0


def test_wait_sleeps_for_its_timeout_and_no_less(pair: Pair) -> None:
    begin = time.monotonic_ns()
    assert net.wait_io(pair[0].fileno(), net.POLLIN, -1, 0, 20_000_000) == 0
    assert time.monotonic_ns() - begin >= 20_000_000


def test_wait_leaves_the_gil_to_others_and_wakes_for_them(pair: Pair) -> None:
    ours, theirs = pair
    waker = threading.Timer(0.02, theirs.send, (b"x",))
    waker.start()
    assert net.wait_io(ours.fileno(), net.POLLIN, -1, 0, 10**10) == net.READY_A
    waker.join()


def test_a_signal_ends_the_wait_after_its_handler_ran(pair: Pair) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert net.wait_io(pair[0].fileno(), net.POLLIN, -1, 0, 10**10) == -errno.EINTR
        assert seen == [signal.SIGALRM]

        def stop(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            net.wait_io(pair[0].fileno(), net.POLLIN, -1, 0, 10**10)
    finally:
        signal.signal(signal.SIGALRM, before)

"""Sockets straight into and out of slots: between the tcp link's inner loop and the kernel (see net.pyx)."""

from typing import Any, Final

import numpy.typing as npt
from typing_extensions import Buffer

Memory = Buffer | npt.NDArray[Any]  # numpy declares the buffer protocol only from Python 3.12 on

AGAIN: Final[int]
"""What a call that would block answers: `-errno.EAGAIN`."""
POLLIN: Final[int]
POLLOUT: Final[int]
READY_A: Final = 1
READY_B: Final = 2

def recv_into(fd: int, mem: Memory, offset: int, length: int) -> int:
    """One non-blocking receive into `mem[offset:offset + length]` (writable contiguous uint8, shape [n]).

    Returns the bytes received (> 0), 0 at the end of the stream, or -errno (`AGAIN` when nothing is there). EINTR is
    retried. Releases the GIL only for `length >= 16384`: a spin poll stays cheap. Raises `ValueError` when the range
    is empty or does not lie within `mem`; nothing was received then. SPEC section 2.
    """

def send_from(fd: int, mem: Memory, offset: int, length: int, more: bool) -> int:
    """One non-blocking send of `mem[offset:offset + length]` (contiguous uint8, shape [n], may be read-only).

    Returns the bytes the kernel took (> 0, perhaps fewer than `length`) or -errno (`AGAIN`, `-EPIPE` without SIGPIPE).
    `more` announces that another call follows at once (MSG_MORE). GIL and `ValueError` as for `recv_into`.
    """

def send_two(fd: int, mem_a: Memory, off_a: int, len_a: int, mem_b: Memory, off_b: int, len_b: int) -> int:
    """One non-blocking sendmsg of two pieces, a header (`len_a >= 1`) and its payload (`len_b >= 0`).

    Returns the bytes taken of both together, in order (a partial send may end within either), or -errno.
    GIL (by `len_a + len_b`) and `ValueError` as for `recv_into`.
    """

def quick_ack(fd: int) -> int:
    """Makes the kernel send an acknowledgement that it is holding back on a TCP socket, now and this once; 0 or -errno."""

def wait_io(fd_a: int, events_a: int, fd_b: int, events_b: int, timeout_ns: int) -> int:
    """Sleeps in ppoll until a file descriptor is ready or `timeout_ns` (nanoseconds; <= 0 only looks) is over.

    A negative fd is left out. Events are `POLLIN` and `POLLOUT`; an error or hang-up counts as ready, the call that
    follows says which. Returns `READY_A | READY_B` bits, 0 at the timeout, or -errno: `-EBADF` for a closed fd,
    `-EINTR` after signal handlers ran (what they raise is raised here). Always releases the GIL.
    """

# The benchmark's floors. All of them: `spin` polls, otherwise `fd` must be blocking with SO_RCVTIMEO and SO_SNDTIMEO;
# `timeout_ns` is the longest wait without a byte moved; `mem` holds `slots` areas of `length` bytes used in turn; the GIL
# is released and signal handlers still run. They return -ECONNRESET (peer closed), -ETIMEDOUT or another -errno on
# failure and raise `ValueError` for sizes below 1 or areas that do not fit. SPEC section 9.

def floor_read(fd: int, spin: bool, timeout_ns: int, mem: Memory) -> int:
    """Fills all of `mem` from the stream; 0 or -errno."""

def floor_write(fd: int, spin: bool, timeout_ns: int, mem: Memory) -> int:
    """Sends all of `mem`; 0 or -errno."""

def floor_ask(
    fd: int, spin: bool, timeout_ns: int, mem: Memory, length: int, slots: int, request: Memory, samples_ns: Memory
) -> int:
    """Sends `request`, lands `length` bytes, once for each of `samples_ns` (uint64 [count], filled); 0 or -errno."""

def floor_answer(
    fd: int, spin: bool, timeout_ns: int, mem: Memory, length: int, slots: int, request: Memory, count: int
) -> int:
    """The other end of `floor_ask`: reads a request of the size of `request`, sends `length` bytes; 0 or -errno."""

def floor_receive(fd: int, spin: bool, timeout_ns: int, mem: Memory, length: int, slots: int, count: int) -> int:
    """Gives the go-ahead, lands `count` messages, acknowledges each with 8 bytes.

    Returns nanoseconds from the go-ahead to the last byte landed, or -errno.
    """

def floor_send(
    fd: int, spin: bool, timeout_ns: int, mem: Memory, length: int, slots: int, window: int, count: int
) -> int:
    """The other end of `floor_receive`, with at most `window` messages not acknowledged.

    Returns nanoseconds from the go-ahead to the last acknowledgement, or -errno.
    """

def floor_memcpy(to: Memory, source: Memory, length: int, slots: int, count: int) -> int:
    """Nanoseconds for `count` copies of `length` bytes, both sides going round their `slots` areas."""

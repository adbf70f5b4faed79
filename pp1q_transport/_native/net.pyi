"""Sockets straight into and out of slots: between the tcp link's inner loop and the kernel (see net.pyx)."""

from typing import Final

from typing_extensions import Buffer

AGAIN: Final[int]
"""What a call that would block answers: `-errno.EAGAIN`."""
POLLIN: Final[int]
POLLOUT: Final[int]
READY_A: Final = 1
READY_B: Final = 2

def recv_into(fd: int, mem: Buffer, offset: int, length: int) -> int:
    """One non-blocking receive into `mem[offset:offset + length]` (writable contiguous uint8, shape [n]).

    Returns the bytes received (> 0), 0 at the end of the stream, or -errno (`AGAIN` when nothing is there). EINTR is
    retried. Releases the GIL only for `length >= 16384`: a spin poll stays cheap. Raises `ValueError` when the range
    is empty or does not lie within `mem`; nothing was received then. SPEC section 2.
    """

def send_from(fd: int, mem: Buffer, offset: int, length: int, more: bool) -> int:
    """One non-blocking send of `mem[offset:offset + length]` (contiguous uint8, shape [n], may be read-only).

    Returns the bytes the kernel took (> 0, perhaps fewer than `length`) or -errno (`AGAIN`, `-EPIPE` without SIGPIPE).
    `more` announces that another call follows at once (MSG_MORE). GIL and `ValueError` as for `recv_into`.
    """

def send_two(fd: int, mem_a: Buffer, off_a: int, len_a: int, mem_b: Buffer, off_b: int, len_b: int) -> int:
    """One non-blocking sendmsg of two pieces, a header (`len_a >= 1`) and its payload (`len_b >= 0`).

    Returns the bytes taken of both together, in order (a partial send may end within either), or -errno.
    GIL (by `len_a + len_b`) and `ValueError` as for `recv_into`.
    """

def wait_io(fd_a: int, events_a: int, fd_b: int, events_b: int, timeout_ns: int) -> int:
    """Sleeps in ppoll until a file descriptor is ready or `timeout_ns` (nanoseconds; <= 0 only looks) is over.

    A negative fd is left out. Events are `POLLIN` and `POLLOUT`; an error or hang-up counts as ready, the call that
    follows says which. Returns `READY_A | READY_B` bits, 0 at the timeout, or -errno: `-EBADF` for a closed fd,
    `-EINTR` after signal handlers ran (what they raise is raised here). Always releases the GIL.
    """

"""Sockets straight into and out of slots: between the tcp link's inner loop and the kernel.

Knows no frames and no sessions, never blocks outside `wait_io`, never raises for what the network did (that is -errno)
and raises `ValueError` for what the caller did. Linux only. SPEC section 2 (data plane), DESIGN decision 3.
"""

import errno as _errno
import select as _select

from libc.errno cimport EINTR
from libc.stdint cimport int64_t, uint8_t
from cpython.exc cimport PyErr_CheckSignals

cdef extern from "pp1q_net.h" nogil:
    Py_ssize_t pp1q_recv(int fd, uint8_t *data, size_t length)
    Py_ssize_t pp1q_send(int fd, const uint8_t *data, size_t length, int more)
    Py_ssize_t pp1q_send2(int fd, const uint8_t *a, size_t length_a, const uint8_t *b, size_t length_b)
    int pp1q_ppoll2(int fd_a, short events_a, int fd_b, short events_b, int64_t timeout_ns)

AGAIN = -_errno.EAGAIN
POLLIN = _select.POLLIN
POLLOUT = _select.POLLOUT
READY_A = 1
READY_B = 2

# Below this a call is over before another thread could use the GIL; handing it over would cost a spin poll dearly.
cdef Py_ssize_t RELEASE_GIL_BYTES = 16384


cdef int _bounds(Py_ssize_t size, Py_ssize_t offset, Py_ssize_t length, Py_ssize_t least) except -1:
    if offset < 0 or length < least or length > size or offset > size - length:
        raise ValueError(
            f"offset {offset} and length {length} (at least {least}) do not lie within a buffer of {size} bytes"
        )
    return 0


cdef inline const uint8_t *_at(const uint8_t[::1] mem, Py_ssize_t offset) noexcept nogil:
    # An empty view has no element whose address could be taken.
    return &mem[0] + offset if mem.shape[0] > 0 else NULL


cpdef Py_ssize_t recv_into(int fd, uint8_t[::1] mem, Py_ssize_t offset, Py_ssize_t length) except? -4096:
    cdef Py_ssize_t moved
    # A receive of no bytes would answer 0, which means end of stream: so at least 1.
    _bounds(mem.shape[0], offset, length, 1)
    cdef uint8_t *data = &mem[0] + offset
    if length < RELEASE_GIL_BYTES:
        return pp1q_recv(fd, data, <size_t>length)
    with nogil:
        moved = pp1q_recv(fd, data, <size_t>length)
    return moved


cpdef Py_ssize_t send_from(
    int fd, const uint8_t[::1] mem, Py_ssize_t offset, Py_ssize_t length, bint more
) except? -4096:
    cdef Py_ssize_t moved
    _bounds(mem.shape[0], offset, length, 1)
    cdef const uint8_t *data = _at(mem, offset)
    if length < RELEASE_GIL_BYTES:
        return pp1q_send(fd, data, <size_t>length, more)
    with nogil:
        moved = pp1q_send(fd, data, <size_t>length, more)
    return moved


cpdef Py_ssize_t send_two(
    int fd, const uint8_t[::1] mem_a, Py_ssize_t off_a, Py_ssize_t len_a,
    const uint8_t[::1] mem_b, Py_ssize_t off_b, Py_ssize_t len_b,
) except? -4096:
    cdef Py_ssize_t moved
    _bounds(mem_a.shape[0], off_a, len_a, 1)
    _bounds(mem_b.shape[0], off_b, len_b, 0)
    cdef const uint8_t *data_a = _at(mem_a, off_a)
    cdef const uint8_t *data_b = _at(mem_b, off_b)
    if len_a + len_b < RELEASE_GIL_BYTES:
        return pp1q_send2(fd, data_a, <size_t>len_a, data_b, <size_t>len_b)
    with nogil:
        moved = pp1q_send2(fd, data_a, <size_t>len_a, data_b, <size_t>len_b)
    return moved


cpdef int wait_io(int fd_a, int events_a, int fd_b, int events_b, int64_t timeout_ns) except? -4096:
    cdef int ready
    with nogil:
        ready = pp1q_ppoll2(fd_a, <short>events_a, fd_b, <short>events_b, timeout_ns)
    if ready == -EINTR:
        # Compiled callers may not reach the interpreter for long: Ctrl-C must not wait for that.
        PyErr_CheckSignals()
    return ready

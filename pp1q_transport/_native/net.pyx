# cython: nonecheck=False
"""Sockets straight into and out of slots: between the tcp link's inner loop and the kernel.

Knows no frames and no sessions, never blocks outside `wait_io`, never raises for what the network did (that is -errno)
and raises `ValueError` for what the caller did. Linux only. SPEC section 2 (data plane), DESIGN decision 3.
"""

import errno as _errno
import select as _select

from libc.errno cimport EINTR
from libc.stdint cimport int64_t, uint8_t, uint64_t
from cpython.exc cimport PyErr_CheckSignals

cdef extern from "pp1q_net.h" nogil:
    Py_ssize_t pp1q_recv(int fd, uint8_t *data, size_t length)
    Py_ssize_t pp1q_send(int fd, const uint8_t *data, size_t length, int more)
    Py_ssize_t pp1q_send2(int fd, const uint8_t *a, size_t length_a, const uint8_t *b, size_t length_b)
    int pp1q_quick_ack(int fd)
    int pp1q_ppoll2(int fd_a, short events_a, int fd_b, short events_b, int64_t timeout_ns)

cdef extern from "net_floor.h" nogil:
    cdef struct net_floor:
        int fd
        int spin
        int64_t timeout_ns
        int (*interrupted)()
    cdef struct net_floor_area:
        uint8_t *memory
        size_t bytes
        size_t slots
    int64_t net_floor_read(const net_floor *end, uint8_t *data, size_t length)
    int64_t net_floor_write(const net_floor *end, const uint8_t *data, size_t length)
    int64_t net_floor_ask(const net_floor *end, net_floor_area area, uint8_t *request, size_t request_bytes,
                          uint64_t *samples_ns, size_t count)
    int64_t net_floor_answer(const net_floor *end, net_floor_area area, uint8_t *request, size_t request_bytes,
                             size_t count)
    int64_t net_floor_receive(const net_floor *end, net_floor_area area, size_t count)
    int64_t net_floor_send(const net_floor *end, net_floor_area area, size_t window, size_t count)
    int64_t net_floor_memcpy(net_floor_area to, net_floor_area source, size_t count)

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


cpdef int quick_ack(int fd) noexcept:
    return pp1q_quick_ack(fd)


cpdef int wait_io(int fd_a, int events_a, int fd_b, int events_b, int64_t timeout_ns) except? -4096:
    cdef int ready
    with nogil:
        ready = pp1q_ppoll2(fd_a, <short>events_a, fd_b, <short>events_b, timeout_ns)
    if ready == -EINTR:
        # Compiled callers may not reach the interpreter for long: Ctrl-C must not wait for that.
        PyErr_CheckSignals()
    return ready


# The benchmark's floors (net_floor.c). Plain functions: nobody calls them from a hot loop, they are the hot loop.


cdef int _interrupted() except -1 with gil:
    PyErr_CheckSignals()
    return 0


cdef net_floor _end(int fd, bint spin, int64_t timeout_ns):
    return net_floor(fd, spin, timeout_ns, <int (*)() noexcept nogil>_interrupted)


cdef net_floor_area _area(uint8_t[::1] mem, Py_ssize_t length, Py_ssize_t slots) except *:
    cdef net_floor_area area
    if slots < 1 or length < 1 or length > mem.shape[0] // slots:
        raise ValueError(f"{slots} slots of {length} bytes do not fit a buffer of {mem.shape[0]} bytes")
    area.memory, area.bytes, area.slots = &mem[0], <size_t>length, <size_t>slots
    return area


cdef uint8_t *_piece(uint8_t[::1] mem) except NULL:
    _bounds(mem.shape[0], 0, mem.shape[0], 1)
    return &mem[0]


cdef int64_t _outcome(int64_t outcome) except -4096:
    # -EINTR only ever comes from _interrupted, whose exception is still set on this thread.
    return -4096 if outcome == -EINTR else outcome


cdef size_t _count(Py_ssize_t count) except? 0:
    if count < 1:
        raise ValueError(f"count and window must be at least 1, not {count}")
    return <size_t>count


def floor_read(int fd, bint spin, int64_t timeout_ns, uint8_t[::1] mem):
    cdef net_floor end = _end(fd, spin, timeout_ns)
    cdef uint8_t *data = _piece(mem)
    cdef size_t length = <size_t>mem.shape[0]
    cdef int64_t outcome
    with nogil:
        outcome = net_floor_read(&end, data, length)
    return _outcome(outcome)


def floor_write(int fd, bint spin, int64_t timeout_ns, const uint8_t[::1] mem):
    cdef net_floor end = _end(fd, spin, timeout_ns)
    cdef size_t length = <size_t>mem.shape[0]
    cdef int64_t outcome
    _bounds(mem.shape[0], 0, mem.shape[0], 1)
    cdef const uint8_t *data = _at(mem, 0)
    with nogil:
        outcome = net_floor_write(&end, data, length)
    return _outcome(outcome)


def floor_ask(
    int fd, bint spin, int64_t timeout_ns, uint8_t[::1] mem, Py_ssize_t length, Py_ssize_t slots,
    uint8_t[::1] request, uint64_t[::1] samples_ns,
):
    cdef net_floor end = _end(fd, spin, timeout_ns)
    cdef net_floor_area area = _area(mem, length, slots)
    cdef uint8_t *asked = _piece(request)
    cdef size_t asked_bytes = <size_t>request.shape[0]
    cdef size_t count = _count(samples_ns.shape[0])
    cdef int64_t outcome
    with nogil:
        outcome = net_floor_ask(&end, area, asked, asked_bytes, &samples_ns[0], count)
    return _outcome(outcome)


def floor_answer(
    int fd, bint spin, int64_t timeout_ns, uint8_t[::1] mem, Py_ssize_t length, Py_ssize_t slots,
    uint8_t[::1] request, Py_ssize_t count,
):
    cdef net_floor end = _end(fd, spin, timeout_ns)
    cdef net_floor_area area = _area(mem, length, slots)
    cdef uint8_t *asked = _piece(request)
    cdef size_t asked_bytes = <size_t>request.shape[0]
    cdef size_t turns = _count(count)
    cdef int64_t outcome
    with nogil:
        outcome = net_floor_answer(&end, area, asked, asked_bytes, turns)
    return _outcome(outcome)


def floor_receive(
    int fd, bint spin, int64_t timeout_ns, uint8_t[::1] mem, Py_ssize_t length, Py_ssize_t slots, Py_ssize_t count
):
    cdef net_floor end = _end(fd, spin, timeout_ns)
    cdef net_floor_area area = _area(mem, length, slots)
    cdef size_t turns = _count(count)
    cdef int64_t outcome
    with nogil:
        outcome = net_floor_receive(&end, area, turns)
    return _outcome(outcome)


def floor_send(
    int fd, bint spin, int64_t timeout_ns, uint8_t[::1] mem, Py_ssize_t length, Py_ssize_t slots,
    Py_ssize_t window, Py_ssize_t count,
):
    cdef net_floor end = _end(fd, spin, timeout_ns)
    cdef net_floor_area area = _area(mem, length, slots)
    cdef size_t unacknowledged = _count(window)
    cdef size_t turns = _count(count)
    cdef int64_t outcome
    with nogil:
        outcome = net_floor_send(&end, area, unacknowledged, turns)
    return _outcome(outcome)


def floor_memcpy(uint8_t[::1] to, uint8_t[::1] source, Py_ssize_t length, Py_ssize_t slots, Py_ssize_t count):
    cdef net_floor_area landing = _area(to, length, slots)
    cdef net_floor_area origin = _area(source, length, slots)
    cdef size_t turns = _count(count)
    cdef int64_t elapsed_ns
    with nogil:
        elapsed_ns = net_floor_memcpy(landing, origin, turns)
    return elapsed_ns

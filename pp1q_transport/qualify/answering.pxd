# C types of answering.py in the compiled build.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pp1q_transport._native.kernels cimport monotonic_ns
from pp1q_transport.links.stream cimport StreamLink
from pp1q_transport.session.leader cimport Grant, LeaderSession

cdef int64_t _ALONE_FROM_BYTES


cdef class Answerer:
    cdef public object source
    cdef public LeaderSession session
    cdef public StreamLink link
    cdef public uint64_t base
    cdef public int64_t slots, depth, requests
    cdef public uint32_t representation
    cdef public const uint8_t[::1] memory
    cdef public int64_t[::1] offsets, lengths, entries, starts, indexes
    cdef public int32_t[::1] tokens

    @cython.locals(number=int64_t, at=int64_t, row=int64_t)
    cpdef int64_t answer(self, Grant grant, int64_t gap_ns) except -1
    @cython.locals(generation=uint32_t, first=int64_t, start_ns=int64_t, now_ns=int64_t, position=int64_t, here=int64_t)
    cdef int64_t _put(self, Grant grant, int64_t row, int32_t[::1] tokens, int64_t at, int64_t gap_ns) except -1
    cdef int32_t[::1] _draw_now(self, Grant grant, int64_t row)

# C types of requests.py in the compiled build.
cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef uint32_t _U32_MAX


cdef class Request:
    cdef public uint64_t request, seed, prefix_low, prefix_high
    cdef public object tokens
    cdef public int64_t anchor
    cdef public uint32_t max_position, generation, round
    cdef public bint in_flight, drew
    cdef public uint32_t drew_generation, drew_round

    cpdef extend(self, tokens)
    cpdef int check_round(self) except -1
    @cython.locals(taken=uint32_t)
    cpdef int64_t next_round(self) except -1
    cpdef discard(self)
    cpdef bint may_draw(self, uint32_t generation, uint32_t round)
    cpdef int mark_drawn(self, uint32_t generation, uint32_t round) except -1

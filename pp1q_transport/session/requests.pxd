# C types of requests.py in the compiled build.
cimport cython
from libc.stdint cimport uint32_t, uint64_t

cdef uint64_t _U32_MAX


cdef class Request:
    cdef public uint64_t request, seed
    cdef public object tokens
    cdef public uint64_t prefix_low, prefix_high
    cdef public uint32_t max_position, generation, round, anchor, owner
    cdef public bint in_flight, drew
    cdef public uint32_t drew_generation, drew_round
    cpdef int check_round(self) except -1
    cpdef uint32_t next_round(self) except? 0
    cpdef bint may_draw(self, uint32_t generation, uint32_t round)
    cpdef mark_drawn(self, uint32_t generation, uint32_t round)

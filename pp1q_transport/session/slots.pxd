# C types of slots.py in the compiled build.
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef bytes _NEXT
cdef int _EVENTS
cdef int _CONSUMERS
cdef int _ILLEGAL
cdef int _FREE
cdef int _READY
cdef int _QUARANTINE
cdef int _GRANT
cdef int _RELEASE_LAST
cdef int _FENCED
cdef uint64_t _GENERATIONS


cdef class SlotGeometry:
    cdef public Py_ssize_t max_slots, depth, row_bytes, slot_bytes, meta_bytes, rows_bytes, total_bytes
    cpdef Py_ssize_t row_offset(self, Py_ssize_t slot, Py_ssize_t row)
    cpdef Py_ssize_t meta_offset(self, Py_ssize_t slot)


cdef class Slot:
    cdef public uint32_t index
    cdef public int state
    cdef public uint32_t generation
    cdef public Py_ssize_t rows_at, row_bytes, meta_at
    cdef public uint64_t request
    cdef public uint32_t request_generation, round, anchor, depth
    cdef public uint64_t seed, context
    cdef public uint32_t representation, support
    cdef public uint64_t rows_done, reply_bytes
    cdef public int64_t deadline_ns, enqueued_ns, ready_ns, last_row_ns
    cdef public uint32_t consumers
    cdef public int reason
    cdef public bint decided, fenced
    cdef public uint32_t epoch
    cdef public uint8_t[::1] digests, masses
    @cython.locals(after=int)
    cpdef int move(self, int event) except -1


cdef class SlotTable:
    cdef public SlotGeometry geometry
    cdef public list slots
    cdef public int count, rank
    cdef public uint32_t floor
    cdef int _next
    @cython.locals(step=int, index=int, slot=Slot)
    cpdef Slot take(self)
    cdef _begin(self, Slot slot, uint32_t generation)
    @cython.locals(bit=uint32_t)
    cpdef bint release(self, Slot slot, uint32_t generation, int rank, int consumer) except -1

# C types of landing.py in the compiled build.
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from pp1q_transport cimport wire
from pp1q_transport._native.kernels cimport DenseCursor, draw_u24, validate_sparse_row, xxh3_64
from pp1q_transport.session.assembler cimport Landing
from pp1q_transport.session.machine cimport SessionMachine
from pp1q_transport.session.slots cimport Slot, SlotTable
from pp1q_transport.session.watchdog cimport Watchdog
from pp1q_transport.wire cimport Header

cdef uint32_t _NO_PROOF
cdef uint32_t _GROUP_BIT
cdef int _VOTED


cdef class LandingSession(SessionMachine):
    cdef public SlotTable table
    cdef public uint8_t[::1] memory
    cdef public Watchdog watchdog
    cdef public DenseCursor cursor
    cdef public list settled, fences
    cdef public uint64_t rows, ready, bytes_ready
    cdef public int quarantine_bound
    cdef public bint relays
    cdef Slot _slot
    cdef uint32_t _row

    cpdef row_done(self, Slot slot, uint32_t row, Header header)
    cpdef completed(self, Slot slot, int64_t now_ns)
    cpdef discard(self, Slot slot, int code, bint tell=*)
    cpdef make_ready(self, Slot slot, int64_t now_ns)
    cpdef invalidate(self, Slot slot, int code)
    cpdef bint release(self, Slot slot, uint32_t generation, int rank, int consumer) except -1
    cpdef tick(self, int64_t now_ns)
    @cython.locals(code=int, slot=Slot)
    cpdef int accept_row(self, Header header, Landing landing) except? -999
    cdef int _not_landing(self, Slot slot, Header header) except? -999
    cdef int _check_identity(self, Slot slot, Header header) except -1
    @cython.locals(row=uint32_t)
    cdef int _check_row(self, Slot slot, Header header) except -1
    cdef int _land(self, Slot slot, Header header, Landing landing) except? -999
    cpdef progress(self, Header header, Py_ssize_t landed)
    @cython.locals(seed=uint64_t, index=int64_t)
    cdef int _judge_values(self, Header header, Py_ssize_t at, int64_t token, uint32_t u24) except -1
    @cython.locals(inside=bint, drawn=bint, token=int64_t, code=int)
    cdef int _judge_shard(self, Header header, Py_ssize_t at, uint32_t u24) except -1
    @cython.locals(slot=Slot, at=Py_ssize_t, u24=uint32_t, code=int, bit=uint64_t)
    cpdef finish_row(self, Header header, int64_t now_ns)
    @cython.locals(slot=Slot, code=int)
    cpdef finish_proposal(self, Header header, int64_t now_ns)
    @cython.locals(full=uint64_t)
    cdef int _judge_completion(self, Slot slot, Header header) except -1

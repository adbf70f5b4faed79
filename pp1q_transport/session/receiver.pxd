# C types of receiver.py in the compiled build.
cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t

from pp1q_transport cimport wire
from pp1q_transport._native.kernels cimport xxh3_64
from pp1q_transport.session.assembler cimport Landing
from pp1q_transport.session.landing cimport LandingSession
from pp1q_transport.session.requests cimport Request
from pp1q_transport.session.slots cimport Slot
from pp1q_transport.wire cimport Header


cdef class ReceiverSession(LandingSession):
    cdef public object group, opened

    @cython.locals(h=Header, slot=Slot)
    cpdef Slot step(self, Request request, int64_t now_ns, uint32_t depth, double temperature, uint32_t support,
                    uint32_t representation, uint64_t target_context, int64_t budget_us, uint64_t trace_id)
    @cython.locals(budget_us=int64_t)
    cdef _mark(self, Slot slot, Header h, int64_t now_ns)
    cdef _grant(self, Slot slot, Header h, Request request, int64_t now_ns)
    cpdef row_done(self, Slot slot, uint32_t row, Header header)
    cpdef completed(self, Slot slot, int64_t now_ns)
    cpdef decide(self, Slot slot, int code, int64_t now_ns)
    cpdef discard(self, Slot slot, int code, bint tell=*)
    @cython.locals(kind=uint32_t, code=int)
    cpdef int accept(self, Header header, Landing landing, int64_t now_ns) except? -999
    @cython.locals(kind=uint32_t)
    cpdef int finish(self, Header header, int64_t now_ns) except? -999
    cdef int _notice(self, Header header) except? -999

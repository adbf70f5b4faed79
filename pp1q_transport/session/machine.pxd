# C types of machine.py in the compiled build.
cimport cython
from libc.stdint cimport uint32_t, uint64_t

from pp1q_transport cimport wire
from pp1q_transport.session.assembler cimport FrameSink
from pp1q_transport.session.outbox cimport Outbox
from pp1q_transport.session.terms cimport SessionTerms
from pp1q_transport.wire cimport Header

cdef int _BOOT_NONCE
cdef int _SESSION_MISMATCH


cdef class SessionMachine(FrameSink):
    cdef public SessionTerms terms
    cdef public object requests, counters
    cdef public Outbox outbox
    cdef public Header header
    cdef public list news
    cdef public int broken, peer_status
    cdef uint64_t _ours_nonce, _theirs_nonce

    @cython.locals(h=Header)
    cpdef Header blank(self, uint32_t kind)
    cpdef int check_peer(self, Header header) except -1
    @cython.locals(h=Header)
    cpdef bytes farewell(self, reason)

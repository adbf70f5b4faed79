# C types of leader.py in the compiled build.
cimport cython
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pp1q_transport cimport wire
from pp1q_transport._native.kernels cimport xxh3_64
from pp1q_transport.session.assembler cimport Landing
from pp1q_transport.session.machine cimport SessionMachine
from pp1q_transport.session.requests cimport Request
from pp1q_transport.session.terms cimport SessionTerms
from pp1q_transport.wire cimport Header


cdef int _IDLE
cdef int _DRAFTING
cdef int _SENT
cdef int _DEAD
cdef uint64_t _POSITIONS


cdef class Grant:
    cdef public uint32_t slot
    cdef public int state
    cdef public uint32_t generation
    cdef public uint64_t request
    cdef public uint32_t request_generation, round, anchor, depth
    cdef public uint64_t seed, context
    cdef public uint32_t representation, support
    cdef public double temperature
    cdef public uint64_t target_context
    cdef public uint32_t budget_us
    cdef public uint64_t trace_id
    cdef public int64_t received_ns
    cdef public uint32_t rows
    cdef public uint64_t reply_bytes
    cdef public uint8_t[::1] digests


cdef class LeaderSession(SessionMachine):
    cdef public list grants, steps, events
    cdef public uint64_t rows, completions
    cdef uint8_t[::1] _tokens

    cpdef bint put_row(self, Grant grant, uint32_t generation, uint32_t position, int64_t token, uint32_t entries,
                       const uint8_t[::1] memory, Py_ssize_t offset, Py_ssize_t length) except -1
    @cython.locals(h=Header)
    cpdef bint put_shard(self, Grant grant, uint32_t generation, uint32_t position, int64_t token, uint32_t entries,
                         const uint8_t[::1] memory, Py_ssize_t offset, Py_ssize_t length, uint32_t shard_mass,
                         uint32_t mass_before) except -1
    cdef int _check_payload(self, Grant grant, uint32_t entries, Py_ssize_t length) except -1
    @cython.locals(h=Header)
    cdef int _complete(self, Grant grant, int status) except -1
    @cython.locals(h=Header)
    cdef Header _answer(self, uint32_t kind, Grant grant)
    @cython.locals(kind=uint32_t)
    cpdef int accept(self, Header header, Landing landing, int64_t now_ns) except? -999
    cpdef progress(self, Header header, Py_ssize_t landed)
    @cython.locals(kind=uint32_t)
    cpdef int finish(self, Header header, int64_t now_ns) except? -999
    @cython.locals(grant=Grant, code=int, request=Request)
    cdef int _step(self, Header header, int64_t now_ns) except -1
    @cython.locals(code=int, request=Request)
    cdef int _judge_step(self, Grant grant, Header header) except -1
    cdef int _judge_policy(self, Header header) except -1
    @cython.locals(h=Header)
    cdef _refuse(self, Header header, int code)
    cdef _landed_tokens(self, Header header)
    cdef int _open(self, Header header) except? -999
    cdef int _commit(self, Header header) except? -999
    @cython.locals(grant=Grant)
    cdef int _close(self, Header header) except? -999
    @cython.locals(grant=Grant)
    cdef int _notice(self, Header header) except? -999

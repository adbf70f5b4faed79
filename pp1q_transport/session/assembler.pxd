# C types of assembler.py in the compiled build.
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t

from pp1q_transport._native.kernels cimport copy_bytes
from pp1q_transport.wire cimport Header


cdef Py_ssize_t _RING
cdef Py_ssize_t _LAND
cdef Py_ssize_t _SCRATCH


cdef class Landing:
    cdef public uint8_t[::1] memory
    cdef public Py_ssize_t offset
    cdef public Py_ssize_t owner
    cdef public bint drain
    cpdef bint abandon(self, Py_ssize_t owner)


cdef class FrameSink:
    cpdef int accept(self, Header header, Landing landing, int64_t now_ns) except? -999
    cpdef progress(self, Header header, Py_ssize_t landed)
    cpdef int finish(self, Header header, int64_t now_ns) except? -999


cdef class Assembler:
    cdef public FrameSink sink
    cdef public Header header
    cdef public Landing landing
    cdef public int failed
    cdef public uint64_t frames, drained_bytes
    cdef uint8_t[::1] _ring
    cdef uint8_t[::1] _scratch
    cdef Py_ssize_t _start, _end, _length, _landed
    cdef bint _in_payload
    cdef public uint8_t[::1] memory
    cdef public Py_ssize_t offset, length

    @cython.locals(rest=Py_ssize_t)
    cpdef want(self)
    @cython.locals(keep=Py_ssize_t, index=Py_ssize_t)
    cdef _compact(self)
    cpdef int received(self, Py_ssize_t count, int64_t now_ns) except -1
    @cython.locals(code=int)
    cdef int _parse(self, int64_t now_ns) except -1
    @cython.locals(code=int)
    cdef int _begin(self, int64_t now_ns) except -1
    @cython.locals(take=Py_ssize_t)
    cdef int _take_from_ring(self, int64_t now_ns) except -1
    @cython.locals(code=int)
    cdef int _step_payload(self, int64_t now_ns) except -1
    cdef int _fail(self, int code) except -1

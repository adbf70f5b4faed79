# C types of stream.py in the compiled build.
cimport cython
from libc.stdint cimport int64_t, uint64_t

from pp1q_transport._native.kernels cimport monotonic_ns
from pp1q_transport.session.assembler cimport Assembler
from pp1q_transport.session.outbox cimport Outbox


cdef class StreamLink:
    cdef public object kind, sock
    cdef public int fd, error_number, broken
    cdef public Assembler assembler
    cdef public Outbox outbox
    cdef public uint64_t bytes_in, bytes_out

    cpdef Py_ssize_t pump(self, int64_t now_ns) except? -4096
    @cython.locals(moved=Py_ssize_t, _look=int)
    cpdef Py_ssize_t pump_until(self, int tries) except? -4096
    cpdef bint fence(self, Py_ssize_t slot)

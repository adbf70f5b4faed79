# C types of outbox.py in the compiled build.
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from pp1q_transport._native.kernels cimport copy_bytes
from pp1q_transport.wire cimport Header


cdef Py_ssize_t _COPY_BELOW
cdef int64_t _NO_KEY


@cython.freelist(64)
cdef class Piece:
    cdef public Py_ssize_t head_offset, head_length, head_end
    cdef public const uint8_t[::1] memory
    cdef public Py_ssize_t offset, length
    cdef public int64_t key
    cdef public bint started


cdef class Outbox:
    cdef public Py_ssize_t capacity
    cdef public uint8_t[::1] buffer
    cdef public list pieces
    cdef public Py_ssize_t first
    cdef public uint64_t frames
    cdef public int64_t bytes_queued
    cdef Py_ssize_t _head, _tail, _held
    cdef const uint8_t[::1] _nothing

    cpdef bint empty(self)
    @cython.locals(large=bint, need=Py_ssize_t, at=Py_ssize_t, last=Piece)
    cpdef frame(self, Header header, const uint8_t[::1] memory, Py_ssize_t offset, Py_ssize_t length, int64_t key)
    @cython.locals(at=Py_ssize_t)
    cpdef raw(self, const uint8_t[::1] memory, Py_ssize_t offset, Py_ssize_t length)
    @cython.locals(at=Py_ssize_t)
    cdef Py_ssize_t _reserve(self, Py_ssize_t need) except -1
    cpdef Piece front(self)
    @cython.locals(piece=Piece, taken=Py_ssize_t, rest=Py_ssize_t)
    cpdef sent(self, Py_ssize_t count)
    @cython.locals(piece=Piece)
    cdef _drop_first(self)
    @cython.locals(piece=Piece, index=Py_ssize_t)
    cpdef int withdraw(self, int64_t key)

# C types of channel.py in the compiled build.
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from pp1q_transport._native.net cimport wait_io
from pp1q_transport._native.ring cimport Ring, drain_bell, ring_bell

cdef int _HEADER
cdef int _FIRST_BUFFER
cdef int _SPIN_LOOKS
cdef int _LOOKS_BEFORE_SLEEP
cdef int _POLLIN
cdef int _CLOSED
cdef int _LENGTH_BOUNDS
cdef int _RESERVED_BITS


cdef class Channel:
    cdef Ring _incoming, _outgoing
    cdef int _my_bell, _peer_bell, _state
    cdef uint8_t[::1] _head, _buffer
    cdef object _view
    cdef Py_ssize_t _wanted
    cdef bint _sent, _took
    cdef readonly Py_ssize_t capacity
    cdef readonly uint64_t records_in, records_out, bytes_in, bytes_out, bells

    @cython.locals(body=bytes, total=Py_ssize_t, wrote=Py_ssize_t)
    cpdef bint send(self, Py_ssize_t kind, bytes fixed, object payload=*) except? -1
    @cython.locals(wake=bint, failed=int)
    cpdef flush_bell(self)
    @cython.locals(got=Py_ssize_t, total=Py_ssize_t, top=uint32_t, kind=uint32_t, zero=uint32_t)
    cpdef receive(self)
    cdef _grow(self, Py_ssize_t total)
    cpdef bint prepare_sleep(self) except? -1
    cpdef after_sleep(self, bint rung=*)
    @cython.locals(failed=int)
    cdef _silence(self)
    @cython.locals(ready=int)
    cpdef wait(self, object idle, int64_t timeout_ns, int other_fd=*)
    cpdef close(self)

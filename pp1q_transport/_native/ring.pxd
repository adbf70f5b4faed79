# C signatures of ring for the compiled hot modules; ring.pyi holds the documentation.
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t


cdef extern from "pp1q_ring.h" nogil:
    cdef struct pp1q_ring:
        uint64_t capacity
        uint64_t own
        int broken


@cython.final
cdef class Ring:
    cdef pp1q_ring ring
    cdef uint8_t[::1] memory
    cdef int role
    cdef int _produce(self) except -1
    cdef int _consume(self) except -1
    # An exception (bounds, misuse) is -4096, which no answer is.
    cpdef Py_ssize_t write(self, const uint8_t[::1] source, Py_ssize_t offset, Py_ssize_t length) except? -4096
    cpdef Py_ssize_t write_all(self, const uint8_t[::1] source, Py_ssize_t offset, Py_ssize_t length) except? -4096
    cpdef Py_ssize_t write_two(
        self, const uint8_t[::1] mem_a, Py_ssize_t off_a, Py_ssize_t len_a,
        const uint8_t[::1] mem_b, Py_ssize_t off_b, Py_ssize_t len_b,
    ) except? -4096
    cpdef Py_ssize_t writable(self) except? -4096
    cpdef bint wait_space(self, Py_ssize_t wanted=*) except? -1
    cpdef int end_wait_space(self) except -1
    cpdef bint wake_needed(self) except? -1
    cpdef Py_ssize_t read_into(self, uint8_t[::1] target, Py_ssize_t offset, Py_ssize_t length) except? -4096
    cpdef Py_ssize_t readable(self) except? -4096
    cpdef Py_ssize_t poll(self, Py_ssize_t looks) except? -4096
    cpdef bint sleep(self) except? -1
    cpdef int awake(self) except -1
    cpdef bint space_needed(self) except? -1


cpdef int ring_bell(int fd) noexcept
cpdef int drain_bell(int fd) noexcept

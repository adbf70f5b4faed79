# C types of shm.py in the compiled build.
cimport cython
from libc.stdint cimport int64_t, uint8_t

from pp1q_transport._native.kernels cimport monotonic_ns
from pp1q_transport._native.net cimport recv_into, send_from, wait_io
from pp1q_transport._native.ring cimport Ring
from pp1q_transport.links.stream cimport StreamLink
from pp1q_transport.session.assembler cimport Assembler
from pp1q_transport.session.outbox cimport Outbox, Piece

cdef int _READS
cdef Py_ssize_t _WRITE_AT_MOST
cdef Py_ssize_t _READ_AT_MOST
cdef Py_ssize_t _HEADERS_AT_MOST
cdef Py_ssize_t _HEADER_ROOM
cdef int64_t _LOOK_EVERY_NS
cdef int _BELLS
cdef int _AGAIN
cdef int _BAD_INDEX
cdef int _PEER_LOST
cdef int _LINK_ERROR


cdef class ShmLink(StreamLink):
    cdef public Py_ssize_t ring_bytes
    cdef Ring _outgoing
    cdef Ring _incoming
    cdef uint8_t[::1] _bells
    cdef int64_t _looked_ns
    cdef bint _gone
    cdef bint _waits
    cdef Py_ssize_t _left

    @cython.locals(moved=Py_ssize_t, sent=Py_ssize_t)
    cpdef Py_ssize_t pump(self, int64_t now_ns) except? -4096
    @cython.locals(total=Py_ssize_t, got=Py_ssize_t, asked=Py_ssize_t, assembler=Assembler, ring=Ring, code=int, _look=int)
    cdef Py_ssize_t _receive(self) except? -4096
    @cython.locals(total=Py_ssize_t, got=Py_ssize_t, ring=Ring, piece=Piece)
    cdef Py_ssize_t _send(self) except? -4096
    cdef Py_ssize_t _write_piece(self, Ring ring, Piece piece) except? -4096
    cdef Py_ssize_t _break(self, int code, int error_number) except? -4096
    cdef _wake_peer(self)
    cdef Py_ssize_t _idle(self, int64_t now_ns) except? -4096
    @cython.locals(got=Py_ssize_t)
    cdef _look(self)
    cdef _sleep(self, int64_t timeout_ns, int other_fd)

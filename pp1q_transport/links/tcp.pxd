# C types of tcp.py in the compiled build.
cimport cython
from libc.stdint cimport int64_t

from pp1q_transport._native.kernels cimport monotonic_ns
from pp1q_transport._native.net cimport quick_ack, recv_into, send_from, send_two, wait_io
from pp1q_transport.links.stream cimport StreamLink
from pp1q_transport.session.assembler cimport Assembler
from pp1q_transport.session.outbox cimport Outbox, Piece

cdef int _RECEIVES
cdef int _ACK_BELOW
cdef Py_ssize_t _LINGER_BYTES
cdef int _AGAIN
cdef int _PEER_LOST
cdef int _LINK_ERROR


cdef class TcpLink(StreamLink):
    cdef int64_t _owed

    @cython.locals(moved=Py_ssize_t, sent=Py_ssize_t)
    cpdef Py_ssize_t pump(self, int64_t now_ns) except? -4096
    @cython.locals(total=Py_ssize_t, got=Py_ssize_t, asked=Py_ssize_t, assembler=Assembler, code=int, _look=int)
    cdef Py_ssize_t _receive(self) except? -4096
    cdef _acknowledge(self)
    @cython.locals(total=Py_ssize_t, got=Py_ssize_t, want=Py_ssize_t, piece=Piece)
    cdef Py_ssize_t _send(self) except? -4096
    cdef Py_ssize_t _send_piece(self, Piece piece) except? -4096
    cdef Py_ssize_t _gone(self, Py_ssize_t result) except? -4096

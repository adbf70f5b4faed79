# C signatures of net for the compiled hot modules; net.pyi holds the documentation.
from libc.stdint cimport int64_t, uint8_t

# An exception (bounds, signals) is -4096: no errno is that large, so the check costs a compare on the normal path.
cpdef Py_ssize_t recv_into(int fd, uint8_t[::1] mem, Py_ssize_t offset, Py_ssize_t length) except? -4096
cpdef Py_ssize_t send_from(int fd, const uint8_t[::1] mem, Py_ssize_t offset, Py_ssize_t length, bint more) except? -4096
cpdef Py_ssize_t send_two(
    int fd, const uint8_t[::1] mem_a, Py_ssize_t off_a, Py_ssize_t len_a,
    const uint8_t[::1] mem_b, Py_ssize_t off_b, Py_ssize_t len_b,
) except? -4096
cpdef int quick_ack(int fd) noexcept
cpdef int wait_io(int fd_a, int events_a, int fd_b, int events_b, int64_t timeout_ns) except? -4096

# cython: nonecheck=False
"""A byte ring in shared memory: between a daemon and its process, one the producer, the other the consumer.

Checks the caller's bounds and the end it plays (`ValueError`); pp1q_ring.h judges what the other process wrote. Knows no records,
the ring makes no system call, the bells one each that never blocks. Documentation is in ring.pyi, the plain-Python oracle in ring_oracle.py.
"""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t, uintptr_t

cdef extern from "pp1q_ring.h" nogil:
    enum:
        PP1Q_RING_HEADER_BYTES
        PP1Q_RING_SLEEPING
        PP1Q_RING_WAITING
    void pp1q_ring_init(pp1q_ring *ring, uint8_t *shared, uint64_t capacity, uint64_t start)
    int64_t pp1q_ring_writable(pp1q_ring *ring)
    int64_t pp1q_ring_readable(pp1q_ring *ring)
    int64_t pp1q_ring_write(pp1q_ring *ring, const uint8_t *source, uint64_t length)
    int64_t pp1q_ring_write_two(pp1q_ring *ring, const uint8_t *a, uint64_t a_length, const uint8_t *b, uint64_t b_length)
    int64_t pp1q_ring_read(pp1q_ring *ring, uint8_t *to, uint64_t length)
    void pp1q_ring_raise(pp1q_ring *ring, size_t flag)
    void pp1q_ring_lower(pp1q_ring *ring, size_t flag)
    int pp1q_ring_take_flag(pp1q_ring *ring, size_t flag)
    int64_t pp1q_ring_poll(pp1q_ring *ring, uint64_t looks)

cdef extern from "pp1q_bell.h" nogil:
    int pp1q_bell_ring(int fd)
    int pp1q_bell_drain(int fd)

HEADER_BYTES = PP1Q_RING_HEADER_BYTES

cdef int _PRODUCER = 1
cdef int _CONSUMER = 2


cdef int _wrong_end() except -1:
    raise ValueError("one Ring object is the producer's end or the consumer's, not both")


cdef inline int _bounds(Py_ssize_t size, Py_ssize_t offset, Py_ssize_t length) except -1:
    if offset < 0 or length < 0 or length > size or offset > size - length:
        raise ValueError(f"{length} bytes at offset {offset} lie outside a buffer of {size} bytes")
    return 0


cdef inline const uint8_t *_at(const uint8_t[::1] mem, Py_ssize_t offset) noexcept nogil:
    # An empty view has no element whose address could be taken.
    return &mem[0] + offset if mem.shape[0] > 0 else NULL


@cython.final
cdef class Ring:
    def __cinit__(self, uint8_t[::1] memory not None, Py_ssize_t offset, Py_ssize_t capacity, uint64_t start=0):
        if capacity < 1 or capacity & (capacity - 1):
            raise ValueError(f"a capacity of {capacity} bytes is no power of two")
        if capacity > memory.shape[0]:
            raise ValueError(f"{capacity} bytes do not fit a buffer of {memory.shape[0]} bytes")
        _bounds(memory.shape[0], offset, capacity + PP1Q_RING_HEADER_BYTES)
        if (<uintptr_t>&memory[offset]) % 8:
            raise ValueError(f"a ring at offset {offset} is not aligned to 8 bytes")
        self.memory = memory
        self.role = 0
        pp1q_ring_init(&self.ring, &memory[offset], <uint64_t>capacity, start)

    @property
    def capacity(self):
        return self.ring.capacity

    @property
    def index(self):
        return self.ring.own

    @property
    def broken(self):
        return self.ring.broken != 0

    # -- the producer's end

    cdef int _produce(self) except -1:
        if self.role != _PRODUCER:
            if self.role:
                return _wrong_end()
            self.role = _PRODUCER
        return 0

    cpdef Py_ssize_t write(self, const uint8_t[::1] source, Py_ssize_t offset, Py_ssize_t length) except? -4096:
        self._produce()
        _bounds(source.shape[0], offset, length)
        return pp1q_ring_write(&self.ring, _at(source, offset), <uint64_t>length)

    cpdef Py_ssize_t write_all(self, const uint8_t[::1] source, Py_ssize_t offset, Py_ssize_t length) except? -4096:
        self._produce()
        _bounds(source.shape[0], offset, length)
        return pp1q_ring_write_two(&self.ring, _at(source, offset), <uint64_t>length, NULL, 0)

    cpdef Py_ssize_t write_two(
        self, const uint8_t[::1] mem_a, Py_ssize_t off_a, Py_ssize_t len_a,
        const uint8_t[::1] mem_b, Py_ssize_t off_b, Py_ssize_t len_b,
    ) except? -4096:
        self._produce()
        _bounds(mem_a.shape[0], off_a, len_a)
        _bounds(mem_b.shape[0], off_b, len_b)
        return pp1q_ring_write_two(&self.ring, _at(mem_a, off_a), <uint64_t>len_a, _at(mem_b, off_b), <uint64_t>len_b)

    cpdef Py_ssize_t writable(self) except? -4096:
        self._produce()
        return pp1q_ring_writable(&self.ring)

    cpdef bint wait_space(self, Py_ssize_t wanted=1) except? -1:
        cdef int64_t room
        self._produce()
        if wanted < 1 or <uint64_t>wanted > self.ring.capacity:
            raise ValueError(f"{wanted} bytes of room will never be there in a ring of {self.ring.capacity}")
        pp1q_ring_raise(&self.ring, PP1Q_RING_WAITING)
        room = pp1q_ring_writable(&self.ring)
        if 0 <= room < wanted:
            return True
        pp1q_ring_lower(&self.ring, PP1Q_RING_WAITING)
        return False

    cpdef int end_wait_space(self) except -1:
        self._produce()
        pp1q_ring_lower(&self.ring, PP1Q_RING_WAITING)
        return 0

    cpdef bint wake_needed(self) except? -1:
        self._produce()
        return pp1q_ring_take_flag(&self.ring, PP1Q_RING_SLEEPING)

    # -- the consumer's end

    cdef int _consume(self) except -1:
        if self.role != _CONSUMER:
            if self.role:
                return _wrong_end()
            self.role = _CONSUMER
        return 0

    cpdef Py_ssize_t read_into(self, uint8_t[::1] target, Py_ssize_t offset, Py_ssize_t length) except? -4096:
        self._consume()
        _bounds(target.shape[0], offset, length)
        return pp1q_ring_read(&self.ring, <uint8_t *>_at(target, offset), <uint64_t>length)

    cpdef Py_ssize_t readable(self) except? -4096:
        self._consume()
        return pp1q_ring_readable(&self.ring)

    cpdef Py_ssize_t poll(self, Py_ssize_t looks) except? -4096:
        cdef int64_t ready
        self._consume()
        if looks < 1:
            raise ValueError(f"{looks} looks are none")
        with nogil:
            ready = pp1q_ring_poll(&self.ring, <uint64_t>looks)
        return ready

    cpdef bint sleep(self) except? -1:
        self._consume()
        pp1q_ring_raise(&self.ring, PP1Q_RING_SLEEPING)
        if pp1q_ring_readable(&self.ring) == 0:
            return True
        pp1q_ring_lower(&self.ring, PP1Q_RING_SLEEPING)
        return False

    cpdef int awake(self) except -1:
        self._consume()
        pp1q_ring_lower(&self.ring, PP1Q_RING_SLEEPING)
        return 0

    cpdef bint space_needed(self) except? -1:
        self._consume()
        return pp1q_ring_take_flag(&self.ring, PP1Q_RING_WAITING)


# -- doorbells


cpdef int ring_bell(int fd) noexcept:
    return pp1q_bell_ring(fd)


cpdef int drain_bell(int fd) noexcept:
    return pp1q_bell_drain(fd)

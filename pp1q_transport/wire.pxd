# C types of wire.py in the compiled build. Nothing here changes what the source means.
cimport cython
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t

from pp1q_transport._native.kernels cimport f32_from_bits, f32_to_bits, xxh3_64

cdef uint64_t _M32
cdef uint64_t _SIGN
cdef uint64_t _WRAP


cdef uint32_t _u16(const uint8_t[::1] b, Py_ssize_t o) noexcept
cdef uint32_t _u32(const uint8_t[::1] b, Py_ssize_t o) noexcept
@cython.locals(low=uint64_t, high=uint64_t)
cdef uint64_t _u64(const uint8_t[::1] b, Py_ssize_t o) noexcept
cdef void _put16(uint8_t[::1] b, Py_ssize_t o, uint32_t v) noexcept
cdef void _put32(uint8_t[::1] b, Py_ssize_t o, uint32_t v) noexcept
@cython.locals(low=uint32_t, high=uint32_t)
cdef void _put64(uint8_t[::1] b, Py_ssize_t o, uint64_t v) noexcept
cdef uint64_t _pair(uint64_t low, uint64_t high) noexcept
cdef list _ALLOWED_LIST


cdef class Header:
    cdef public uint32_t version, kind, flags
    cdef public uint64_t boot_nonce, session, request
    cdef public uint32_t slot_generation, request_generation, round, position
    cdef public uint32_t slot, shard, depth, representation
    cdef public uint32_t payload_length, entry_count
    cdef public uint64_t payload_digest, header_digest
    cdef public uint64_t prefix_low, prefix_high, target_context, trace_id
    cdef public double temperature
    cdef public uint32_t support_policy, budget_us
    cdef public int32_t token
    cdef public uint32_t draw_counter
    cdef public uint64_t context
    cdef public uint32_t first_id, end_id, shard_mass, mass_before
    cdef public uint64_t reply_size, reply_digest
    cdef public uint32_t positions, status
    cdef public uint64_t seed
    cdef public uint32_t token_count, max_position, accepted, source, subject
    cdef public uint32_t epoch, owner, floor, phase, sequence, purpose
    cdef public uint64_t state_low, state_high
    cdef uint8_t[::1] _scratch

    cpdef void clear(self)
    cpdef int decode(self, const uint8_t[::1] buf, Py_ssize_t offset) except -1
    @cython.locals(allowed=uint32_t, stray=uint64_t)
    cdef int _stray_fields(self) except -1
    @cython.locals(kind=uint32_t, a0=uint64_t, a1=uint64_t, a2=uint64_t, a3=uint64_t, a4=uint64_t, a5=uint64_t)
    cdef int _decode_args(self, const uint8_t[::1] buf, Py_ssize_t offset) except -1
    @cython.locals(kind=uint32_t, stray=uint64_t)
    cdef int _decode_group(self, uint64_t a0, uint64_t a1, uint64_t a2, uint64_t a3, uint64_t a4, uint64_t a5) except -1
    @cython.locals(low=uint32_t)
    cdef void _set_token(self, uint64_t a0)
    cpdef void encode(self, uint8_t[::1] buf, Py_ssize_t offset)
    @cython.locals(kind=uint32_t, a0=uint64_t, a1=uint64_t, a2=uint64_t, a3=uint64_t, a4=uint64_t, a5=uint64_t)
    cdef void _encode_args(self, uint8_t[::1] buf, Py_ssize_t offset)
    @cython.locals(b=uint8_t[::1])
    cpdef uint64_t payload_seed(self, uint64_t leader_nonce) except? 0
    @cython.locals(b=uint8_t[::1])
    cpdef uint64_t step_context(self) except? 0


cpdef void put_digest_entry(uint8_t[::1] buf, Py_ssize_t index, uint32_t position, uint32_t size, uint64_t digest)

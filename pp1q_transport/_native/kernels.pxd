# C signatures of the binding, so that compiled modules can cimport it and call without a Python object in between.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "pp1q_kernels.h" nogil:
    ctypedef unsigned long long u128 "pp1q_u128"  # 128 bits wide in C, whatever is written here

    ctypedef struct pp1q_target:
        const uint8_t *weights
        size_t n
        int wide
        int exponent


cdef class DenseCursor:
    cdef void *cursor
    cdef const uint8_t[::1] mem
    cdef Py_ssize_t row_bytes
    cdef Py_ssize_t landed
    cdef bint open
    cdef readonly uint64_t digest
    cpdef int begin(self, const uint8_t[::1] mem, Py_ssize_t offset, Py_ssize_t entries, Py_ssize_t row_bytes,
                    uint64_t seed) except? -1
    cpdef int advance(self, Py_ssize_t landed) except? -1
    cpdef int finish(self, uint64_t expected_digest, uint64_t expected_mass, int64_t token_index,
                     uint32_t u24) except? -1
    cpdef int abandon(self) except? -1


cdef class TargetRow:
    cdef void *memory  # residual masses of 16 bytes, then weight masses of 8, one of each a block of 1024 tokens
    cdef size_t blocks
    cdef const uint8_t[::1] mem
    cdef const uint8_t[::1] q_mem
    cdef const uint8_t[::1] id_mem
    cdef pp1q_target row
    cdef const uint8_t *q
    cdef const uint8_t *ids
    cdef size_t entries
    cdef readonly uint64_t all_total
    cdef uint64_t residual_high
    cdef uint64_t residual_low
    cdef bint fixed
    cdef bint residual_ready
    cdef readonly uint64_t total
    cdef readonly uint64_t counts
    cdef readonly int exponent
    cdef int _reserve_masses(self, size_t n) except -1
    cdef uint64_t *_weight_masses(self) noexcept
    cdef int _check_fixed(self) except -1
    cdef int _begin_residual(self, uint64_t total) except -1
    cdef int _end_residual(self, int reason, u128 found) except -1
    cpdef int load(self, const uint8_t[::1] mem, Py_ssize_t offset, Py_ssize_t n, bint wide) except? -1
    cpdef int block_sums(self, double[::1] out) except? -1
    cpdef int fix(self) except? -1
    cpdef int fix_to(self, int exponent) except? -1
    cpdef uint64_t weight(self, Py_ssize_t index) except? 0
    cpdef int64_t pick(self, uint64_t threshold) except? -1
    cpdef int residual_dense(self, const uint8_t[::1] mem, Py_ssize_t offset, uint64_t total) except? -1
    cpdef int residual_sparse(self, const uint8_t[::1] mem, Py_ssize_t offset, const uint8_t[::1] id_mem,
                              Py_ssize_t id_offset, Py_ssize_t entries, uint64_t total) except? -1
    cpdef int64_t pick_residual(self, uint64_t high, uint64_t low) except? -1


cdef class ShardedRow(TargetRow):
    cdef size_t shards
    cdef size_t rank
    cdef int64_t[65] ids_from  # where shards begin: in tokens, and in blocks of the tree
    cdef uint32_t[65] blocks_from
    cdef size_t[64] node_counts
    cdef size_t all_nodes
    cdef size_t words
    cdef uint64_t *gathered  # the messages of all ranks, then their nodes without gaps
    cdef u128[64] masses
    cdef u128[64] wide_masses
    cdef double[::1] nodes
    cdef uint64_t[::1] facts
    cdef uint64_t[::1] residual
    cdef int64_t[::1] told
    cdef Py_buffer[3] buffers
    cdef bint[3] held
    cdef const int32_t *global_ids
    cdef int32_t *own_ids
    cdef size_t own_ids_room
    cdef int64_t token
    cdef bint bound
    cdef bint began
    cdef bint bad
    cdef bint settled
    cdef readonly size_t most_nodes
    cdef readonly uint64_t all_counts
    cdef void _let_go(self, int which) noexcept
    cdef Py_buffer *_hold(self, int which, object array, str name) except NULL
    cdef int _hold_q(self, object values, object ids) except -1
    cdef int _take(self, object answer, const void *own, size_t words) except -1
    cdef uint64_t _noise(self, object u64) except? 0
    cdef int _reason(self, uint64_t code) except -1
    cdef int _shift_ids(self) except -1
    cpdef int begin(self, object weights) except? -1
    cpdef int fix_by(self, object answer) except? -1
    cpdef int put_facts(self, object drafted, object values, object ids, object u64) except? -1
    cpdef int settle(self, object answer) except? -1
    cpdef int verdict(self, object answer) except? -128
    cpdef int choose(self, object answer) except? -1
    cpdef int put_residual(self, object values, object ids, object u64) except? -1
    cpdef int choose_residual(self, object answer) except? -128
    cpdef int64_t token_told(self, object answer) except? -1


cpdef int target_exponent(double total) except? -1
cpdef bint accept(uint64_t u64, uint32_t count, uint64_t weight, uint64_t total) except? True
cpdef uint64_t xxh3_64(const uint8_t[::1] data, Py_ssize_t offset, Py_ssize_t length, uint64_t seed) except? 0
cpdef (uint64_t, uint64_t) xxh3_128(const uint8_t[::1] data, Py_ssize_t offset, Py_ssize_t length) except *
cpdef (uint64_t, uint64_t) prefix_digest(uint64_t low, uint64_t high, const int32_t[::1] tokens) except *

cpdef int validate_dense_row(const uint8_t[::1] mem, Py_ssize_t offset, Py_ssize_t entries, Py_ssize_t row_bytes,
                             uint64_t expected_mass, int64_t token_index, uint32_t u24) except? -1
cpdef int validate_sparse_row(const uint8_t[::1] mem, Py_ssize_t q_offset, Py_ssize_t id_offset, Py_ssize_t n,
                              int64_t first_id, int64_t end_id, uint64_t expected_mass, int64_t token,
                              uint32_t u24) except? -1
cpdef int64_t draw(const uint32_t[::1] counts, uint32_t u24) except? -1
cpdef int64_t draw_q(const uint8_t[::1] mem, Py_ssize_t offset, Py_ssize_t entries, uint32_t u24) except? -1
cpdef int counts_to_q(const uint32_t[::1] counts, uint8_t[::1] mem, Py_ssize_t offset) except? -1
cpdef int q_to_counts(const uint8_t[::1] mem, Py_ssize_t offset, Py_ssize_t n, uint32_t[::1] counts) except? -1

cpdef int allocate(const double[::1] weights, uint32_t[::1] counts) except? -1
cpdef int block_sums(const double[::1] weights, double[::1] out) except? -1
cpdef double tree_sum(const double[::1] sums) except? -1.0
cpdef Py_ssize_t tree_nodes(const double[::1] sums, Py_ssize_t first, Py_ssize_t blocks, double[::1] out) except? -1
cpdef double tree_root(const uint32_t[::1] edges, const double[::1] nodes) except? -1.0
cpdef int64_t top_k(const double[::1] weights, Py_ssize_t k, int32_t[::1] ids) except? -1

cpdef (uint32_t, uint32_t, uint32_t, uint32_t) philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                                          uint32_t k0, uint32_t k1) noexcept
cpdef uint32_t draw_u24(uint64_t seed, uint32_t domain, uint32_t generation, uint32_t round,
                        uint32_t position) except? 0
cpdef uint64_t draw_u64(uint64_t seed, uint32_t domain, uint32_t generation, uint32_t round,
                        uint32_t position) except? 0

cpdef int copy_bytes(uint8_t[::1] dst, Py_ssize_t dst_offset, const uint8_t[::1] src, Py_ssize_t src_offset,
                     Py_ssize_t length) except? -1
cpdef int64_t monotonic_ns() noexcept
cpdef double f32_from_bits(uint32_t bits) noexcept
cpdef uint32_t f32_to_bits(double value) noexcept

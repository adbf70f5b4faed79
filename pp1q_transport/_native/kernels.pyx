# cython: nonecheck=False
"""Bindings of the C kernels: between typed buffers of any module and bare pointers.

Every (buffer, offset, length) is checked here, before memory is touched (`ValueError`); values are judged in C and
answered as reason codes, 0 for "in order". Knows no frames, no `Reason` objects and no numpy. SPEC sections 2 to 5.
"""

from libc.string cimport memcpy
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memmove


cdef extern from "pp1q_kernels.h" nogil:
    ctypedef struct pp1q_cursor:
        pass

    ctypedef struct pp1q_ops_t "const struct pp1q_ops":
        const char *name
        uint64_t (*hash64)(const void *data, size_t length, uint64_t seed)
        void (*hash128)(const void *data, size_t length, uint64_t *out)

    pp1q_ops_t *active "pp1q_ops"
    void pp1q_level_init()
    pp1q_ops_t *pp1q_level(size_t index)
    int pp1q_level_select(const char *name)
    const char *pp1q_reason_name(int code)

    pp1q_cursor *pp1q_cursor_new()
    void pp1q_cursor_free(pp1q_cursor *cursor)
    int pp1q_cursor_begin(pp1q_cursor *cursor, const uint8_t *row, size_t entries, size_t row_bytes, uint64_t seed)
    void pp1q_cursor_advance(pp1q_cursor *cursor, size_t landed)
    int pp1q_cursor_finish(pp1q_cursor *cursor, uint64_t expected_digest, uint64_t expected_mass, int64_t token,
                           uint32_t u24, uint64_t *digest)

    int pp1q_validate_dense(const uint8_t *row, size_t entries, size_t row_bytes, uint64_t expected_mass,
                            int64_t token, uint32_t u24)
    int pp1q_validate_sparse(const uint8_t *q, const uint8_t *ids, size_t n, int64_t first_id, int64_t end_id,
                             uint64_t expected_mass, int64_t token, uint32_t u24)
    int64_t pp1q_draw_counts(const uint32_t *counts, size_t n, uint32_t u24)
    int64_t pp1q_draw_q(const uint8_t *q, size_t n, uint32_t u24)
    int pp1q_counts_to_q(const uint32_t *counts, size_t n, uint8_t *q)
    int pp1q_q_to_counts(const uint8_t *q, size_t n, uint32_t *counts)

    size_t pp1q_allocate_scratch_bytes(size_t n)
    int pp1q_block_sums(const double *weights, size_t n, double *out)
    double pp1q_tree_sum(double *sums, size_t n)
    size_t pp1q_tree_nodes(double *sums, size_t first, size_t end, size_t blocks, double *out)
    double pp1q_tree_root(const uint32_t *edges, size_t shards, const double *nodes)
    size_t pp1q_tree_node_count(size_t first, size_t end, size_t blocks)
    int pp1q_allocate(const double *weights, size_t n, uint32_t *counts, void *scratch)
    size_t pp1q_top_k_scratch_bytes(size_t n, size_t k)
    int64_t pp1q_top_k(const double *weights, size_t n, size_t k, int32_t *ids, void *scratch)

    void pp1q_philox4x32(const uint32_t *counter, const uint32_t *key, uint32_t *out)
    void pp1q_draw_words(uint64_t seed, uint32_t domain, uint32_t generation, uint32_t round, uint32_t position,
                         uint32_t *out)
    void pp1q_prefix_digest(uint64_t *digest, const int32_t *tokens, size_t n)
    int64_t pp1q_monotonic_ns()


NO_DRAW = 0xFFFFFFFF
MASS = 1 << 24

pp1q_level_init()

# Grown, never shrunk, used under the GIL by one kernel at a time: a fresh allocation per row would pay page faults.
cdef void *scratch = NULL
cdef size_t scratch_bytes = 0


cdef int _reserve(size_t wanted) except -1:
    global scratch, scratch_bytes
    cdef void *grown
    if wanted > scratch_bytes:
        grown = malloc(wanted)
        if grown == NULL:
            raise MemoryError(f"no {wanted} bytes of scratch memory")
        free(scratch)
        scratch = grown
        scratch_bytes = wanted
    return 0


cdef int _refuse(Py_ssize_t size, Py_ssize_t offset, Py_ssize_t length) except -1:
    raise ValueError(f"{length} bytes at offset {offset} lie outside a buffer of {size} bytes")


cdef inline int _within(Py_ssize_t size, Py_ssize_t offset, Py_ssize_t length) except -1:
    if offset < 0 or length < 0 or length > size or offset > size - length:
        return _refuse(size, offset, length)
    return 0


cdef inline int _values_within(Py_ssize_t size, Py_ssize_t offset, Py_ssize_t n) except -1:
    if n < 0 or n > size // 4:
        raise ValueError(f"{n} values of 4 bytes do not fit a buffer of {size} bytes")
    return _within(size, offset, 4 * n)


# -- levels (for tests, benchmarks and `doctor`) -----------------------------------------------------------------------


def levels():
    """Names of the instruction-set levels this CPU can run, the fastest last."""
    names = []
    cdef size_t index = 0
    while pp1q_level(index) != NULL:
        names.append((<bytes>pp1q_level(index).name).decode())
        index += 1
    return tuple(names)


def level():
    """Name of the level in use."""
    return (<bytes>active.name).decode()


def select_level(str name):
    """Switches every kernel to another level, for tests; `ValueError` if this CPU has none of that name."""
    if pp1q_level_select(name.encode()) != 0:
        raise ValueError(f"this CPU has no level {name!r}; it has {', '.join(levels())}")


def reason_codes():
    """Every reason of the C enum: {name in capitals: code}."""
    codes = {}
    cdef int code = 1
    while pp1q_reason_name(code) != NULL:
        codes[(<bytes>pp1q_reason_name(code)).decode()] = code
        code += 1
    return codes


# -- digests -----------------------------------------------------------------------------------------------------------


cpdef uint64_t xxh3_64(const uint8_t[::1] data, Py_ssize_t offset, Py_ssize_t length, uint64_t seed) except? 0:
    """XXH3-64 of `length` bytes at `offset` under `seed`."""
    _within(data.shape[0], offset, length)
    return active.hash64(&data[0] + offset, <size_t>length, seed)


cpdef (uint64_t, uint64_t) xxh3_128(const uint8_t[::1] data, Py_ssize_t offset, Py_ssize_t length) except *:
    """XXH3-128 (seed 0) of `length` bytes at `offset`, as (low, high)."""
    cdef uint64_t[2] out
    _within(data.shape[0], offset, length)
    active.hash128(&data[0] + offset, <size_t>length, out)
    return (out[0], out[1])


cpdef (uint64_t, uint64_t) prefix_digest(uint64_t low, uint64_t high, const int32_t[::1] tokens) except *:
    """Extends the committed-prefix digest (low, high) by `tokens`; the empty prefix is (0, 0). SPEC section 2."""
    cdef uint64_t[2] digest
    digest[0] = low
    digest[1] = high
    pp1q_prefix_digest(digest, &tokens[0], <size_t>tokens.shape[0])
    return (digest[0], digest[1])


# -- rows --------------------------------------------------------------------------------------------------------------


cdef class DenseCursor:
    """Digests and validates one dense row, or vocabulary shard, while its bytes land. begin, advance..., finish.

    Reusable; keeps a reference to the buffer from `begin` to `finish` or `abandon`.
    """

    def __cinit__(self):
        self.cursor = pp1q_cursor_new()
        if self.cursor == NULL:
            raise MemoryError("no memory for a cursor")

    def __dealloc__(self):
        pp1q_cursor_free(<pp1q_cursor *>self.cursor)

    cpdef int begin(self, const uint8_t[::1] mem, Py_ssize_t offset, Py_ssize_t entries, Py_ssize_t row_bytes,
                    uint64_t seed) except? -1:
        """Starts on `entries` FP32 values at `offset`, padded with zero bytes to `row_bytes`; drops any earlier row."""
        _within(mem.shape[0], offset, row_bytes)
        _values_within(row_bytes, 0, entries)
        if pp1q_cursor_begin(<pp1q_cursor *>self.cursor, &mem[0] + offset, <size_t>entries, <size_t>row_bytes,
                             seed) != 0:
            raise MemoryError("no memory for block sums")
        self.mem = mem
        self.row_bytes = row_bytes
        self.landed = 0
        self.open = True
        return 0

    cpdef int advance(self, Py_ssize_t landed) except? -1:
        """Takes in that `landed` bytes of the row, in total, have arrived (never fewer than before)."""
        if not self.open:
            raise ValueError("no row is open: call begin first")
        if landed < self.landed or landed > self.row_bytes:
            raise ValueError(f"landed went from {self.landed} to {landed} of {self.row_bytes} bytes")
        pp1q_cursor_advance(<pp1q_cursor *>self.cursor, <size_t>landed)
        self.landed = landed
        return 0

    cpdef int finish(self, uint64_t expected_digest, uint64_t expected_mass, int64_t token_index,
                     uint32_t u24) except? -1:
        """Closes the row and returns a reason code, 0 for "in order".

        Decided in this order: payload digest, first failing value, padding, mass, token out of range, q(token) = 0,
        draw proof. `token_index` counts from the row's first value, -1 for no token in this shard; `u24` is relative
        to the mass before the shard, `NO_DRAW` for no proof. With no token, a u24 inside the shard's mass is refused.
        """
        cdef int reason
        if not self.open:
            raise ValueError("no row is open: call begin first")
        if self.landed != self.row_bytes:
            raise ValueError(f"only {self.landed} of {self.row_bytes} bytes have landed")
        reason = pp1q_cursor_finish(<pp1q_cursor *>self.cursor, expected_digest, expected_mass, token_index, u24,
                                    &self.digest)
        self.open = False
        self.mem = None
        return reason

    cpdef int abandon(self) except? -1:
        """Lets go of the buffer, whatever has landed; does nothing when no row is open."""
        self.open = False
        self.mem = None
        return 0


cpdef int validate_dense_row(const uint8_t[::1] mem, Py_ssize_t offset, Py_ssize_t entries, Py_ssize_t row_bytes,
                             uint64_t expected_mass, int64_t token_index, uint32_t u24) except? -1:
    """`DenseCursor` without the digest, over a row that lies there whole. Returns a reason code."""
    _within(mem.shape[0], offset, row_bytes)
    _values_within(row_bytes, 0, entries)
    return pp1q_validate_dense(&mem[0] + offset, <size_t>entries, <size_t>row_bytes, expected_mass, token_index, u24)


cpdef int validate_sparse_row(const uint8_t[::1] mem, Py_ssize_t q_offset, Py_ssize_t id_offset, Py_ssize_t n,
                              int64_t first_id, int64_t end_id, uint64_t expected_mass, int64_t token,
                              uint32_t u24) except? -1:
    """Judges `n` FP32 values and `n` int32 IDs within [first_id, end_id). Returns a reason code.

    Per entry: ID range, duplicate, order, finite, sign, dyadic, zero; then mass, token range, q(token) = 0 (absent
    too), draw proof. `token` is a global ID, -1 for none; `u24` as in `DenseCursor.finish`.
    """
    _values_within(mem.shape[0], q_offset, n)
    _values_within(mem.shape[0], id_offset, n)
    return pp1q_validate_sparse(&mem[0] + q_offset, &mem[0] + id_offset, <size_t>n, first_id, end_id, expected_mass,
                                token, u24)


cpdef int64_t draw(const uint32_t[::1] counts, uint32_t u24) except? -1:
    """The first index whose cumulative count exceeds `u24`; `ValueError` if the counts sum to no more than that."""
    cdef int64_t index = pp1q_draw_counts(&counts[0], <size_t>counts.shape[0], u24)
    if index < 0:
        raise ValueError(f"the counts end before draw {u24}")
    return index


cpdef int64_t draw_q(const uint8_t[::1] mem, Py_ssize_t offset, Py_ssize_t entries, uint32_t u24) except? -1:
    """`draw` from FP32 values; `ValueError` also for a value up to the drawn one that is not dyadic."""
    cdef int64_t index
    _values_within(mem.shape[0], offset, entries)
    index = pp1q_draw_q(&mem[0] + offset, <size_t>entries, u24)
    if index == -1:
        raise ValueError(f"the row ends before draw {u24}")
    if index < 0:
        raise ValueError("the row holds a value that is not dyadic")
    return index


cpdef int counts_to_q(const uint32_t[::1] counts, uint8_t[::1] mem, Py_ssize_t offset) except? -1:
    """Writes counts/2^24 as FP32 at `offset`; `ValueError` for a count above 2^24 (what was written is void)."""
    _values_within(mem.shape[0], offset, counts.shape[0])
    if pp1q_counts_to_q(&counts[0], <size_t>counts.shape[0], &mem[0] + offset) != 0:
        raise ValueError("a count exceeds 2^24")
    return 0


cpdef int q_to_counts(const uint8_t[::1] mem, Py_ssize_t offset, Py_ssize_t n, uint32_t[::1] counts) except? -1:
    """Recovers `n` counts from FP32 values. Returns the reason code of the first failing value; sums nothing."""
    _values_within(mem.shape[0], offset, n)
    if counts.shape[0] < n:
        raise ValueError(f"{n} counts do not fit an array of {counts.shape[0]}")
    return pp1q_q_to_counts(&mem[0] + offset, <size_t>n, &counts[0])


# -- allocation --------------------------------------------------------------------------------------------------------


cpdef int allocate(const double[::1] weights, uint32_t[::1] counts) except? -1:
    """Allocates 2^24 over `weights` into `counts` (SPEC section 3). Returns a reason code; counts are void unless 0."""
    cdef Py_ssize_t n = weights.shape[0]
    if counts.shape[0] != n:
        raise ValueError(f"{n} weights need {n} counts, not {counts.shape[0]}")
    if n >= 1 << 31:
        raise ValueError("more than 2^31 - 1 weights")
    _reserve(pp1q_allocate_scratch_bytes(<size_t>n))
    return pp1q_allocate(&weights[0], <size_t>n, &counts[0], scratch)


cpdef int block_sums(const double[::1] weights, double[::1] out) except? -1:
    """Sums of the blocks of 32 weights, the leaves of the fixed tree; the last block is filled with zeros.

    `out` holds ceil(n/32) sums. Returns a reason code: INVALID_WEIGHTS for NaN, infinite or sign-carrying weights.
    """
    cdef Py_ssize_t n = weights.shape[0]
    if out.shape[0] != (n + 31) // 32:
        raise ValueError(f"{n} weights have {(n + 31) // 32} block sums, not {out.shape[0]}")
    return pp1q_block_sums(&weights[0], <size_t>n, &out[0])


cpdef double tree_sum(const double[::1] sums) except? -1.0:
    """The root of the fixed tree over block sums: pairs level by level, an odd last one carried up unchanged."""
    cdef size_t n = <size_t>sums.shape[0]
    _reserve(n * sizeof(double) + 64)
    memmove(scratch, &sums[0], n * sizeof(double))
    return pp1q_tree_sum(<double *>scratch, n)


cpdef Py_ssize_t tree_nodes(const double[::1] sums, Py_ssize_t first, Py_ssize_t blocks, double[::1] out) except? -1:
    """The sums of the fewest whole nodes of the tree over `blocks` leaves that make up those of `sums`, which start at leaf
    `first`. Returns how many were written to `out`, which has room for 128."""
    cdef Py_ssize_t n = sums.shape[0]
    if first < 0 or blocks < 0 or first > blocks or n > blocks - first or blocks >= 1 << 31:
        raise ValueError(f"{n} leaves from {first} are not among {blocks}")
    if out.shape[0] < 128:
        raise ValueError(f"nodes need room for 128, not {out.shape[0]}")
    _reserve(<size_t>n * sizeof(double) + 64)
    memmove(scratch, &sums[0], <size_t>n * sizeof(double))
    return <Py_ssize_t>pp1q_tree_nodes(<double *>scratch, <size_t>first, <size_t>(first + n), <size_t>blocks, &out[0])


cpdef double tree_root(const uint32_t[::1] edges, const double[::1] nodes) except? -1.0:
    """The root of the tree from the nodes of all shards, in order. Shard s has the leaves [edges[s], edges[s + 1])."""
    cdef Py_ssize_t shards = edges.shape[0] - 1, s
    cdef size_t wanted = 0
    if shards < 1 or edges[0] != 0 or edges[shards] >= <uint32_t>1 << 31:
        raise ValueError("edges must begin at 0 and end below 2^31")
    for s in range(shards):
        if edges[s + 1] < edges[s] or edges[s + 1] > edges[shards]:
            raise ValueError("edges must not fall")
        wanted += pp1q_tree_node_count(edges[s], edges[s + 1], edges[shards])
    if <size_t>nodes.shape[0] != wanted:
        raise ValueError(f"these shards have {wanted} nodes, not {nodes.shape[0]}")
    return pp1q_tree_root(&edges[0], <size_t>shards, &nodes[0])


cpdef int64_t top_k(const double[::1] weights, Py_ssize_t k, int32_t[::1] ids) except? -1:
    """Writes the ascending indexes of the `k` largest positive weights (ties to the lowest) into `ids`.

    Returns how many there are, or minus the code of INVALID_WEIGHTS for a NaN, infinite or sign-carrying weight.
    """
    cdef Py_ssize_t n = weights.shape[0]
    if k < 1 or n >= 1 << 31:
        raise ValueError(f"cannot choose {k} of {n} weights")
    k = min(k, n)
    if ids.shape[0] < k:
        raise ValueError(f"{k} ids do not fit an array of {ids.shape[0]}")
    if n == 0:
        return 0
    _reserve(pp1q_top_k_scratch_bytes(<size_t>n, <size_t>k))
    return pp1q_top_k(&weights[0], <size_t>n, <size_t>k, &ids[0], scratch)


include "target.pxi"
include "shards.pxi"


# -- random numbers, copies, clock -------------------------------------------------------------------------------------


cpdef (uint32_t, uint32_t, uint32_t, uint32_t) philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                                          uint32_t k0, uint32_t k1) noexcept:
    """Philox4x32-10 of one counter under one key."""
    cdef uint32_t[4] counter
    cdef uint32_t[2] key
    cdef uint32_t[4] out
    counter[0] = c0
    counter[1] = c1
    counter[2] = c2
    counter[3] = c3
    key[0] = k0
    key[1] = k1
    pp1q_philox4x32(counter, key, out)
    return (out[0], out[1], out[2], out[3])


cdef inline int _domain_fits(uint32_t domain) except -1:
    if domain > 255:
        raise ValueError(f"domain {domain} does not fit 8 bits")
    return 0


cpdef uint32_t draw_u24(uint64_t seed, uint32_t domain, uint32_t generation, uint32_t round,
                        uint32_t position) except? 0:
    """The 24-bit draw of one (seed, domain, generation, round, position). SPEC section 5."""
    cdef uint32_t[4] out
    _domain_fits(domain)
    pp1q_draw_words(seed, domain, generation, round, position, out)
    return out[0] >> 8


cpdef uint64_t draw_u64(uint64_t seed, uint32_t domain, uint32_t generation, uint32_t round,
                        uint32_t position) except? 0:
    """The 64-bit draw (word 0 high, word 1 low) of one (seed, domain, generation, round, position)."""
    cdef uint32_t[4] out
    _domain_fits(domain)
    pp1q_draw_words(seed, domain, generation, round, position, out)
    return (<uint64_t>out[0] << 32) | out[1]


cpdef int copy_bytes(uint8_t[::1] dst, Py_ssize_t dst_offset, const uint8_t[::1] src, Py_ssize_t src_offset,
                     Py_ssize_t length) except? -1:
    """Copies `length` bytes; source and destination may overlap."""
    _within(dst.shape[0], dst_offset, length)
    _within(src.shape[0], src_offset, length)
    memmove(&dst[0] + dst_offset, &src[0] + src_offset, <size_t>length)
    return 0


cpdef int64_t monotonic_ns() noexcept:
    """CLOCK_MONOTONIC in nanoseconds, as `time.monotonic_ns`."""
    return pp1q_monotonic_ns()


cpdef double f32_from_bits(uint32_t bits) noexcept:
    """The FP32 value of an IEEE bit pattern."""
    cdef float value
    memcpy(&value, &bits, 4)
    return value


cpdef uint32_t f32_to_bits(double value) noexcept:
    """The IEEE bit pattern of a value rounded to FP32."""
    cdef float rounded = <float>value
    cdef uint32_t bits
    memcpy(&bits, &rounded, 4)
    return bits

# Verification and the greedy commit (pp1q_verify.c): a part of kernels.pyx, whose helpers it uses.

cdef extern from "pp1q_kernels.h" nogil:
    int pp1q_target_sums(const pp1q_target *target, double *sums)
    int pp1q_target_exponent(double total)
    uint64_t pp1q_target_weight(const pp1q_target *target, size_t index)
    uint64_t pp1q_target_masses(const pp1q_target *target, uint64_t *masses)
    int64_t pp1q_target_pick(const pp1q_target *target, const uint64_t *masses, uint64_t threshold)
    int pp1q_residual_dense(const pp1q_target *target, uint64_t total, const uint8_t *q, u128 *masses, uint64_t *counts,
                            u128 *sum)
    int pp1q_residual_sparse(const pp1q_target *target, uint64_t total, const uint64_t *weight_masses, const uint8_t *q,
                             const uint8_t *ids, size_t entries, u128 *masses, uint64_t *counts, u128 *sum)
    int64_t pp1q_residual_pick(const pp1q_target *target, uint64_t total, const uint8_t *q, const uint8_t *ids, size_t entries,
                               const u128 *masses, u128 threshold)
    int pp1q_accept(uint64_t u64, uint32_t count, uint64_t weight, uint64_t total)
    size_t pp1q_greedy_commit(const void *drafts, int wide_drafts, const void *winners, int wide_winners,
                              const int32_t *depths, size_t requests, size_t depth, int64_t vocab_size, int64_t *tokens,
                              int32_t *accepted)

cdef extern from *:
    """
    #define PP1Q_HIGH(x) ((uint64_t)((x) >> 64))
    #define PP1Q_LOW(x) ((uint64_t)(x))
    #define PP1Q_WIDE(high, low) (((pp1q_u128)(high) << 64) | (low))
    """
    uint64_t high_of "PP1Q_HIGH"(u128 value) nogil
    uint64_t low_of "PP1Q_LOW"(u128 value) nogil
    u128 wide_of "PP1Q_WIDE"(uint64_t high, uint64_t low) nogil

cdef int NO_EXPONENT = -2147483648
cdef int _INVALID_WEIGHTS = 51  # PP1Q_E_INVALID_WEIGHTS
MAX_FIXED_TOTAL = 1 << 52


cdef class TargetRow:
    """A target's weights, or a shard of them, as integers; then the residual against one q. SPEC section 6 (c).

    `load`, then `fix` (or `fix_to` in a shard), then any number of `weight`, `pick`, `residual_*` and `pick_residual`.
    Reusable. Keeps references to the buffers given; they may not change meanwhile.
    """

    def __cinit__(self):
        self.row.n = 0
        self.fixed = False
        self.residual_ready = False

    def __dealloc__(self):
        free(self.memory)

    cdef int _reserve_masses(self, size_t n) except -1:
        cdef size_t blocks = n // 1024 + 1
        cdef void *grown
        if blocks > self.blocks:
            grown = malloc(blocks * 24)  # 16-byte residual masses first: malloc aligns for them
            if grown == NULL:
                raise MemoryError(f"no memory for {blocks} block masses")
            free(self.memory)
            self.memory = grown
            self.blocks = blocks
        return 0

    cdef uint64_t *_weight_masses(self) noexcept:
        return <uint64_t *>(<uint8_t *>self.memory + 16 * self.blocks)

    cpdef int load(self, const uint8_t[::1] mem, Py_ssize_t offset, Py_ssize_t n, bint wide) except? -1:
        """Takes `n` weights, FP64 if `wide` and FP32 otherwise, at `offset`. Returns 0, nothing is judged yet."""
        cdef Py_ssize_t size = 8 if wide else 4
        if n < 0 or n > mem.shape[0] // size or n >= 1 << 31:
            raise ValueError(f"{n} values of {size} bytes do not fit a buffer of {mem.shape[0]} bytes")
        _within(mem.shape[0], offset, size * n)
        self._reserve_masses(<size_t>n)
        self.mem = mem
        self.row.weights = &mem[0] + offset
        self.row.n = <size_t>n
        self.row.wide = wide
        self.fixed = False
        self.residual_ready = False
        return 0

    cpdef int block_sums(self, double[::1] out) except? -1:
        """Leaves of the fixed tree over the weights, ceil(n/32) of them. Returns a reason code (INVALID_WEIGHTS)."""
        if <size_t>out.shape[0] != (self.row.n + 31) // 32:
            raise ValueError(f"{self.row.n} weights have {(self.row.n + 31) // 32} block sums, not {out.shape[0]}")
        return pp1q_target_sums(&self.row, &out[0])

    cpdef int fix(self) except? -1:
        """`fix_to` by the weights' own tree sum. Returns a reason code: INVALID_WEIGHTS for a bad weight or no usable sum."""
        cdef size_t blocks = (self.row.n + 31) // 32
        cdef int exponent
        _reserve(blocks * sizeof(double) + 64)
        if pp1q_target_sums(&self.row, <double *>scratch) != 0:
            return _INVALID_WEIGHTS
        exponent = pp1q_target_exponent(pp1q_tree_sum(<double *>scratch, blocks))
        if exponent == NO_EXPONENT:
            return _INVALID_WEIGHTS
        return self.fix_to(exponent)

    cpdef int fix_to(self, int exponent) except? -1:
        """Makes each weight the integer nearest to weight * 2^exponent (ties to even) and sums them into `total`.

        The weights must be good (`block_sums`) and their sum over all shards times 2^exponent at most 2^51.
        """
        if not -900 < exponent < 1000:
            raise ValueError(f"exponent {exponent} is out of range")
        self.fixed = False
        self.residual_ready = False
        self.row.exponent = exponent
        self.exponent = exponent
        self.total = pp1q_target_masses(&self.row, self._weight_masses())
        if self.total > <uint64_t>1 << 52:
            raise ValueError(f"weights times 2^{exponent} sum to more than 2^52")
        self.fixed = True
        return 0

    cdef int _check_fixed(self) except -1:
        if not self.fixed:
            raise ValueError("the weights are no integers yet: call fix first")
        return 0

    cpdef uint64_t weight(self, Py_ssize_t index) except? 0:
        """The integer weight at `index`."""
        self._check_fixed()
        if index < 0 or <size_t>index >= self.row.n:
            raise ValueError(f"index {index} is outside {self.row.n} weights")
        return pp1q_target_weight(&self.row, <size_t>index)

    cpdef int64_t pick(self, uint64_t threshold) except? -1:
        """The first index whose cumulative weight exceeds `threshold`; `ValueError` if that is `total` or more."""
        self._check_fixed()
        if threshold >= self.total:
            raise ValueError(f"threshold {threshold} is beyond the mass of {self.total}")
        return pp1q_target_pick(&self.row, self._weight_masses(), threshold)

    cpdef int residual_dense(self, const uint8_t[::1] mem, Py_ssize_t offset, uint64_t total) except? -1:
        """Residual masses against dense q, FP32 [n] at `offset`; `total` is W over all shards. Returns a reason code.

        `counts` is then the sum of q's counts, `residual_mass()` what max(p - q, 0) sums to in units of 1/(M*W).
        """
        cdef u128 found = 0
        cdef int reason
        self._begin_residual(total)
        _values_within(mem.shape[0], offset, <Py_ssize_t>self.row.n)
        reason = pp1q_residual_dense(&self.row, total, &mem[0] + offset, <u128 *>self.memory, &self.counts, &found)
        self._end_residual(reason, found)
        self.q_mem = mem
        self.id_mem = None
        self.q = &mem[0] + offset
        self.ids = NULL
        return reason

    cpdef int residual_sparse(self, const uint8_t[::1] mem, Py_ssize_t offset, const uint8_t[::1] id_mem,
                              Py_ssize_t id_offset, Py_ssize_t entries, uint64_t total) except? -1:
        """The same against `entries` FP32 values and int32 IDs, ascending and counted from this row's first weight."""
        cdef u128 found = 0
        cdef int reason
        self._begin_residual(total)
        _values_within(mem.shape[0], offset, entries)
        _values_within(id_mem.shape[0], id_offset, entries)
        reason = pp1q_residual_sparse(&self.row, total, self._weight_masses(), &mem[0] + offset, &id_mem[0] + id_offset,
                                      <size_t>entries, <u128 *>self.memory, &self.counts, &found)
        self._end_residual(reason, found)
        self.q_mem = mem
        self.id_mem = id_mem
        self.q = &mem[0] + offset
        self.ids = &id_mem[0] + id_offset
        self.entries = <size_t>entries
        return reason

    cdef int _begin_residual(self, uint64_t total) except -1:
        self._check_fixed()
        if total < self.total or total > <uint64_t>1 << 52:
            raise ValueError(f"total {total} is not within {self.total}..2^52")
        self.all_total = total
        self.counts = 0
        self.residual_ready = False
        return 0

    cdef int _end_residual(self, int reason, u128 found) except -1:
        self.residual_high = high_of(found)
        self.residual_low = low_of(found)
        self.residual_ready = reason == 0
        return 0

    def residual_mass(self):
        """What the residual sums to over this row: an integer up to 2^76."""
        return (int(self.residual_high) << 64) | self.residual_low

    cpdef int64_t pick_residual(self, uint64_t high, uint64_t low) except? -1:
        """The first index whose cumulative residual exceeds high * 2^64 + low; `ValueError` if that is beyond its mass."""
        cdef int64_t index
        if not self.residual_ready:
            raise ValueError("no residual: call residual_dense or residual_sparse first")
        index = pp1q_residual_pick(&self.row, self.all_total, self.q, self.ids, self.entries, <const u128 *>self.memory,
                                   wide_of(high, low))
        if index < 0:
            raise ValueError("the threshold is beyond the mass of the residual")
        return index


cpdef int target_exponent(double total) except? -1:
    """The exponent for weights whose tree sum over all shards is `total`; `ValueError` if it has none."""
    cdef int exponent = pp1q_target_exponent(total)
    if exponent == NO_EXPONENT:
        raise ValueError(f"weights that sum to {total} have no exponent")
    return exponent


cpdef bint accept(uint64_t u64, uint32_t count, uint64_t weight, uint64_t total) except? True:
    """u64 * count * total < 2^64 * M * weight, exactly. `ValueError` for a total above 2^52 or a weight above it."""
    if not 1 <= count <= 16777216 or total > <uint64_t>1 << 52 or weight > total:
        raise ValueError(f"count {count}, weight {weight} and total {total} are no probabilities")
    return pp1q_accept(u64, count, weight, total) != 0


cdef const uint8_t[::1] _tokens(object array, Py_ssize_t wanted, bint *wide, str name):
    view = memoryview(array)
    if view.format not in ("i", "q", "l") or not view.c_contiguous or view.itemsize not in (4, 8):
        raise ValueError(f"{name} must be contiguous int32 or int64")
    if view.nbytes != wanted * view.itemsize:
        raise ValueError(f"{name} has {view.nbytes // view.itemsize} tokens, not {wanted}")
    wide[0] = view.itemsize == 8
    return view.cast("B") if view.nbytes else b""


def greedy_commit(drafts, winners, depths, Py_ssize_t depth, int64_t vocab_size, int64_t[::1] tokens, int32_t[::1] accepted):
    """Accepted prefix and bonus of each of `len(accepted)` requests: see pp1q_greedy_commit for shapes and meaning.

    `drafts` and `winners` are each int32 or int64, `depths` int32 or None. Returns 0, or 1 + the request that holds a depth,
    draft or winner out of range.
    """
    cdef Py_ssize_t requests = accepted.shape[0]
    cdef bint wide_drafts = False, wide_winners = False
    cdef const uint8_t[::1] draft_bytes, winner_bytes
    cdef const int32_t[::1] own
    cdef const int32_t *own_start = NULL
    if depth < 0 or depth >= 1 << 20 or requests >= 1 << 31 or tokens.shape[0] != requests * (depth + 1):
        raise ValueError(f"{requests} requests of depth {depth} have {requests * (depth + 1)} tokens, not {tokens.shape[0]}")
    draft_bytes = _tokens(drafts, requests * depth, &wide_drafts, "drafts")
    winner_bytes = _tokens(winners, requests * (depth + 1), &wide_winners, "winners")
    if depths is not None:
        own = depths
        if own.shape[0] != requests:
            raise ValueError(f"{requests} requests have as many depths, not {own.shape[0]}")
        own_start = &own[0]
    if requests == 0:
        return 0
    return pp1q_greedy_commit(&draft_bytes[0], wide_drafts, &winner_bytes[0], wide_winners, own_start, <size_t>requests,
                              <size_t>depth, vocab_size, &tokens[0], &accepted[0])

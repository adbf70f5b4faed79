# One rank's part of verification over a sharded vocabulary: a part of kernels.pyx, beside target.pxi, whose TargetRow it extends.
#
# Between a rank's weights and q on one side and messages of 64-bit words on the other, which a collective carries: each step is one
# call that reads what all ranks sent, and writes what this one sends next. `shards_oracle` is the same in plain Python.

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.number cimport PyIndex_Check
from libc.string cimport memcmp, memset

cdef extern from "pp1q_kernels.h" nogil:
    int64_t pp1q_choose(uint64_t u64, const u128 *masses, size_t n, u128 *inside)
    int32_t pp1q_count_at(const uint8_t *q, const uint8_t *ids, size_t entries, size_t index)
    int E_NONDYADIC "PP1Q_E_NONDYADIC"
    int E_ZERO_Q_TOKEN "PP1Q_E_ZERO_Q_TOKEN"

cdef enum:
    # Words of the messages: of the facts about weights and a drafted token, and of the residual.
    MASS_WORD = 0, FACT_NOISE = 1, WEIGHT = 2, COUNT = 3, FACT_CODE = 4, FACTS = 5
    NOISE = 0, CODE = 1, COUNTS = 2, HIGH = 3, LOW = 4, RESIDUAL = 5
    WEIGHTS_AT = 0, Q_AT = 1, IDS_AT = 2  # what is held
    MOST_SHARDS = 64  # the nodes of all shards have to fit the tree's stack

FACT_WORDS = FACTS
RESIDUAL_WORDS = RESIDUAL
NO_RESIDUAL = -1
WRONG_MASS = -2


cdef class ShardedRow(TargetRow):
    """A target's weights in the range of one rank, `edges[rank]` to `edges[rank + 1]` of a vocabulary of `edges[-1]` tokens.

    The messages are the caller's arrays, bound once and overwritten by each step: `nodes` FP64 [`most_nodes`], `facts` and
    `residual` of as many 64-bit words as FACT_WORDS and RESIDUAL_WORDS, `told` int64 [1]. An answer is a list with the messages
    of all ranks in order (of `told`: with their sum). Weights and q are read where they lie, until the next row.
    """

    def __cinit__(self, Py_ssize_t rank, edges):
        cdef size_t s, blocks, nodes
        cdef list given = [int(edge) for edge in edges]
        if not 2 <= len(given) <= MOST_SHARDS + 1 or not 0 <= rank < len(given) - 1:
            raise ValueError(f"rank {rank} of {len(given) - 1} shards: there may be {MOST_SHARDS}")
        last = given[len(given) - 1]
        if given[0] != 0 or not 0 < last < 1 << 31 or given != sorted(given):
            raise ValueError("edges must begin at 0, never fall and end at a vocabulary's size")
        self.shards = len(given) - 1
        self.rank = rank
        for s in range(self.shards + 1):
            if given[s] % 32 and given[s] != last:
                raise ValueError("edges between shards must be multiples of 32")
            self.ids_from[s] = given[s]
            self.blocks_from[s] = (given[s] + 31) // 32
        blocks = self.blocks_from[self.shards]
        for s in range(self.shards):
            nodes = pp1q_tree_node_count(self.blocks_from[s], self.blocks_from[s + 1], blocks)
            self.node_counts[s] = nodes
            self.all_nodes += nodes
            self.most_nodes = max(self.most_nodes, nodes)
        self.words = max(self.most_nodes, <size_t>FACTS)
        self.gathered = <uint64_t *>malloc(8 * self.shards * self.words + 8 * self.all_nodes)
        if self.gathered == NULL:
            raise MemoryError("no memory for the messages of all ranks")
        self.token = -1

    def __dealloc__(self):
        cdef int which
        for which in range(3):
            self._let_go(which)
        free(self.gathered)
        free(self.own_ids)

    # -- what is held and what comes in --------------------------------------------------------------------------------

    cdef void _let_go(self, int which) noexcept:
        if self.held[which]:
            PyBuffer_Release(&self.buffers[which])
            self.held[which] = False

    cdef Py_buffer *_hold(self, int which, object array, str name) except NULL:
        """Holds the memory of a contiguous one-dimensional array."""
        cdef Py_buffer *taken = &self.buffers[which]
        self._let_go(which)
        try:
            PyObject_GetBuffer(array, taken, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
        except TypeError:
            raise ValueError(f"{name} must be an array, not {type(array).__name__}") from None
        self.held[which] = True
        if taken.ndim != 1 or taken.format == NULL or taken.format[0] == 0 or taken.format[1] != 0:
            self._let_go(which)
            raise ValueError(f"{name} must be a one-dimensional array of plain numbers")
        return taken

    cdef int _hold_q(self, object values, object ids) except -1:
        """Holds this rank's part of q. Dense: as many values as weights."""
        cdef Py_buffer *taken = self._hold(Q_AT, values, "q")
        if taken.format[0] != c'f':
            raise ValueError(f"q must be float32, not {taken.format.decode()}")
        self.entries = <size_t>taken.len // 4
        self.q = <const uint8_t *>taken.buf
        self.global_ids = NULL
        if ids is None:
            self._let_go(IDS_AT)
            if self.entries != self.row.n:
                raise ValueError(f"q has {self.entries} entries and the shard {self.row.n}")
            return 0
        taken = self._hold(IDS_AT, ids, "the IDs of q")
        if taken.format[0] != c'i' or taken.itemsize != 4:
            raise ValueError(f"the IDs of q must be int32, not {taken.format.decode()}")
        if <size_t>taken.len // 4 != self.entries:
            raise ValueError(f"a sparse q has {taken.len // 4} IDs and {self.entries} values")
        self.global_ids = <const int32_t *>taken.buf
        return 0

    cdef int _take(self, object answer, const void *own, size_t words) except -1:
        """Copies the messages of all ranks, of which this rank's must be its own."""
        cdef Py_buffer part
        cdef size_t s, size = 8 * words
        cdef bint fits
        cdef list parts = answer if type(answer) is list else list(answer)
        if <size_t>len(parts) != self.shards:
            raise ValueError(f"an answer of {len(parts)} ranks, not {self.shards}")
        for s in range(self.shards):
            PyObject_GetBuffer(parts[s], &part, PyBUF_SIMPLE)
            fits = <size_t>part.len == size and part.itemsize == 8
            if fits:
                memcpy(self.gathered + s * words, part.buf, size)
            PyBuffer_Release(&part)
            if not fits:
                raise ValueError(f"rank {s} sent something else than {words} words")
        if memcmp(self.gathered + self.rank * words, own, size) != 0:
            raise ValueError("the answer's parts are not in the order of ranks")
        return 0

    cdef uint64_t _noise(self, object u64) except? 0:
        if self.rank == 0 and PyIndex_Check(u64) and 0 <= u64 < 1 << 64:
            return <uint64_t>u64
        if self.rank != 0 and u64 is None:
            return 0
        raise ValueError(f"noise is rank 0's alone: rank {self.rank} has {u64}")

    cdef int _reason(self, uint64_t code) except -1:
        if code >= 128 or pp1q_reason_name(<int>code) == NULL:
            raise ValueError(f"a rank sent reason {code}, which there is none of")
        return <int>code

    def bind(self, nodes, facts, residual, told):
        """The arrays that messages are written to."""
        cdef double[::1] first = nodes
        cdef uint64_t[::1] second = facts, third = residual
        cdef int64_t[::1] fourth = told
        if (<size_t>first.shape[0], second.shape[0], third.shape[0], fourth.shape[0]) != (self.most_nodes, FACTS, RESIDUAL, 1):
            raise ValueError(f"messages are {self.most_nodes} nodes, {FACTS} and {RESIDUAL} words, and one token")
        self.nodes, self.facts, self.residual, self.told = first, second, third, fourth
        self.bound = True

    # -- the steps -----------------------------------------------------------------------------------------------------

    cpdef int begin(self, object weights) except? -1:
        """Takes float32 or float64 weights and writes `nodes`. Returns a reason code: with INVALID_WEIGHTS there are no nodes, and
        a rank sends an empty array in their place."""
        cdef size_t first = self.blocks_from[self.rank], end = self.blocks_from[self.rank + 1], found = 0
        cdef Py_buffer *taken
        if not self.bound:
            raise ValueError("no messages are bound")
        self.fixed = self.settled = self.residual_ready = self.began = False
        self.row.n = 0  # what was held so far is let go
        taken = self._hold(WEIGHTS_AT, weights, "target weights")
        if taken.format[0] != c'f' and taken.format[0] != c'd':
            raise ValueError(f"target weights must be float32 or float64, not {taken.format.decode()}")
        self.row.wide = taken.format[0] == c'd'
        if taken.shape[0] != self.ids_from[self.rank + 1] - self.ids_from[self.rank]:
            raise ValueError(f"{taken.shape[0]} weights do not fit rank {self.rank}'s shard of the vocabulary")
        self.row.n = <size_t>taken.shape[0]
        self.row.weights = <const uint8_t *>taken.buf
        self._reserve_masses(self.row.n)
        _reserve((end - first) * sizeof(double) + 64)
        self.began = True
        self.bad = pp1q_target_sums(&self.row, <double *>scratch) != 0
        if self.bad:
            return _INVALID_WEIGHTS
        found = pp1q_tree_nodes(<double *>scratch, first, end, self.blocks_from[self.shards], &self.nodes[0])
        memset(&self.nodes[0] + found, 0, 8 * (self.most_nodes - found))
        return 0

    cpdef int fix_by(self, object answer) except? -1:
        """The weights become integers under the exponent of all ranks' nodes. Returns a reason code (INVALID_WEIGHTS), on every
        rank alike, where one of them sent none."""
        cdef double *packed = <double *>(self.gathered + self.shards * self.words)
        cdef const double *sent
        cdef size_t s, held = 0
        cdef int exponent
        if not self.began:
            raise ValueError("no weights: call begin first")
        self.began = False
        for part in answer:
            if len(part) == 0:
                return _INVALID_WEIGHTS
        if self.bad:
            raise ValueError("the answer has nodes of this rank, which sent none")
        self._take(answer, &self.nodes[0], self.most_nodes)
        for s in range(self.shards):
            sent = <const double *>(self.gathered + s * self.most_nodes)
            memcpy(packed + held, sent, 8 * self.node_counts[s])
            held += self.node_counts[s]
        exponent = pp1q_target_exponent(pp1q_tree_root(self.blocks_from, self.shards, packed))
        if exponent == NO_EXPONENT:
            return _INVALID_WEIGHTS
        return self.fix_to(exponent)

    cpdef int put_facts(self, object drafted, object values, object ids, object u64) except? -1:
        """Writes `facts`: this rank's mass, rank 0's noise, and what the rank that holds `token` knows of it (-1: no token)."""
        cdef int64_t token, first = self.ids_from[self.rank]
        cdef size_t index
        cdef int32_t count
        if not self.bound:
            raise ValueError("no messages are bound")
        self._check_fixed()
        if not PyIndex_Check(drafted) or not -1 <= drafted < self.ids_from[self.shards]:
            raise ValueError(f"token {drafted} is outside the target's vocabulary of {self.ids_from[self.shards]}")
        token = drafted
        self.facts[MASS_WORD] = self.total
        self.facts[FACT_NOISE] = self._noise(u64)
        self.facts[WEIGHT] = self.facts[COUNT] = self.facts[FACT_CODE] = 0
        self.token = token
        if first <= token < self.ids_from[self.rank + 1]:
            self.residual_ready = False  # the q that it was for is let go
            self._hold_q(values, ids)
            index = <size_t>(token - first)
            if index >= self.row.n:
                raise ValueError(f"token {token} is beyond the {self.row.n} weights that were loaded")
            count = pp1q_count_at(self.q, <const uint8_t *>self.global_ids, self.entries,
                                  index if ids is None else <size_t>token)
            self.facts[WEIGHT] = pp1q_target_weight(&self.row, index)
            self.facts[COUNT] = <uint64_t>max(count, 0)
            self.facts[FACT_CODE] = E_NONDYADIC if count < 0 else 0
        return 0

    cpdef int settle(self, object answer) except? -1:
        """Reads the `facts` of all ranks: W is known from here on."""
        cdef size_t s
        cdef uint64_t mass
        if not self.bound:
            raise ValueError("no messages are bound")
        self._check_fixed()
        self._take(answer, &self.facts[0], FACTS)
        self.all_total = 0
        for s in range(self.shards):
            mass = self.gathered[s * FACTS + MASS_WORD]
            self.masses[s] = wide_of(0, mass)
            self.all_total += mass
            if mass > <uint64_t>1 << 52 or self.all_total > <uint64_t>1 << 52:
                raise ValueError("the weights of all ranks sum to more than 2^52")
        self.settled = True
        return 0

    cpdef int verdict(self, object answer) except? -128:
        """`settle`, and whether the token survives: 1 or 0, or minus the code of the reason why it could not be drawn from q."""
        cdef const uint64_t *known
        cdef size_t s = 0
        self.settle(answer)
        if self.token < 0:
            raise ValueError("no token: call put_facts with one first")
        while self.token >= self.ids_from[s + 1]:
            s += 1
        known = self.gathered + s * FACTS
        if known[FACT_CODE] != 0 or known[COUNT] == 0:
            return -self._reason(known[FACT_CODE]) if known[FACT_CODE] != 0 else -E_ZERO_Q_TOKEN
        return accept(self.gathered[FACT_NOISE], <uint32_t>known[COUNT], known[WEIGHT], self.all_total)

    cpdef int choose(self, object answer) except? -1:
        """`settle`, and a draw from p by the noise: writes `told`, which is 0 on every rank but one."""
        cdef u128 inside = 0
        cdef int64_t chosen
        self.settle(answer)
        chosen = pp1q_choose(self.gathered[FACT_NOISE], self.masses, self.shards, &inside)
        self.told[0] = 0
        if chosen == <int64_t>self.rank:
            self.told[0] = self.ids_from[self.rank] + self.pick(low_of(inside))
        return 0

    cpdef int put_residual(self, object values, object ids, object u64) except? -1:
        """Writes `residual`: rank 0's noise, and what is left of this rank's weights over its part of q."""
        cdef u128 found = 0
        cdef int reason = 0
        if not self.settled:
            raise ValueError("the total of all ranks is not known: call settle, verdict or choose first")
        self.residual[NOISE] = self._noise(u64)
        self._begin_residual(self.all_total)
        self._hold_q(values, ids)
        self.ids = NULL
        if ids is not None:
            self._shift_ids()
            reason = pp1q_residual_sparse(&self.row, self.all_total, self._weight_masses(), self.q,
                                          <const uint8_t *>self.own_ids, self.entries, <u128 *>self.memory, &self.counts,
                                          &found)
            self.ids = <const uint8_t *>self.own_ids
        elif self.row.n:
            reason = pp1q_residual_dense(&self.row, self.all_total, self.q, <u128 *>self.memory, &self.counts, &found)
        self._end_residual(reason, found)
        self.residual[CODE] = <uint64_t>reason
        self.residual[COUNTS] = self.counts
        self.residual[HIGH] = self.residual_high
        self.residual[LOW] = self.residual_low
        return 0

    cdef int _shift_ids(self) except -1:
        """The IDs of q counted from the first of the range; one outside becomes one that no range has."""
        cdef int64_t first = self.ids_from[self.rank]
        cdef size_t i
        if self.entries >= self.own_ids_room:  # one more than needed: without entries too it is no NULL, which means a dense q
            free(self.own_ids)
            self.own_ids_room = 0
            self.own_ids = <int32_t *>malloc(4 * (self.entries + 1))
            if self.own_ids == NULL:
                raise MemoryError(f"no memory for {self.entries} IDs")
            self.own_ids_room = self.entries + 1
        for i in range(self.entries):
            self.own_ids[i] = <int32_t>(self.global_ids[i] - first) if self.global_ids[i] >= first else -1
        return 0

    cpdef int choose_residual(self, object answer) except? -128:
        """Reads the `residual` of all ranks and draws from it: writes `told`, 0 on every rank but one. Returns 0, the first rank's
        reason code, WRONG_MASS (`all_counts` is the sum then) or NO_RESIDUAL."""
        cdef u128 inside = 0
        cdef int64_t chosen
        cdef size_t s
        cdef const uint64_t *known
        if not self.bound:
            raise ValueError("no messages are bound")
        self._take(answer, &self.residual[0], RESIDUAL)
        self.all_counts = 0
        for s in range(self.shards):
            known = self.gathered + s * RESIDUAL
            if known[CODE] != 0:
                return self._reason(known[CODE])
            self.all_counts += known[COUNTS]
            self.wide_masses[s] = wide_of(known[HIGH], known[LOW])
        if self.all_counts != <uint64_t>1 << 24:
            return WRONG_MASS
        chosen = pp1q_choose(self.gathered[NOISE], self.wide_masses, self.shards, &inside)
        if chosen < 0:
            return NO_RESIDUAL
        self.told[0] = 0
        if chosen == <int64_t>self.rank:
            self.told[0] = self.ids_from[self.rank] + self.pick_residual(high_of(inside), low_of(inside))
        return 0

    cpdef int64_t token_told(self, object answer) except? -1:
        """The token, from the sum of what all ranks wrote to `told`."""
        cdef const int64_t[::1] sums
        if len(answer) != 1:
            raise ValueError(f"a sum is one array, not {len(answer)}")
        sums = answer[0]
        if sums.shape[0] != 1 or not 0 <= sums[0] < self.ids_from[self.shards]:
            raise ValueError("no token of the vocabulary was told")
        return sums[0]

    def shard_masses(self):
        """The integer weights of every shard, summed; known once settled."""
        if not self.settled:
            raise ValueError("the masses of all ranks are not known yet")
        return tuple(low_of(self.masses[s]) for s in range(self.shards))

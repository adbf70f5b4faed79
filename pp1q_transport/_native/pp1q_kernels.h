/* The C kernels of pp1q: between the Cython binding (kernels.pyx), which checks every bound, and bytes in memory.
 *
 * Nothing here allocates for a caller (a cursor excepted), does I/O, knows frames or sessions, or checks that a pointer
 * is valid. All values in memory are little-endian. A function that judges returns a reason code: 0 is "in order", else
 * the wire code of errors.Reason of the same name (a test compares every one). SPEC sections 2, 3, 4 and 5.
 */
#ifndef PP1Q_KERNELS_H
#define PP1Q_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pp1q carries little-endian values as they lie in memory; this target is not little-endian"
#endif

/* In the order of errors.Reason; append-only. */
#define PP1Q_REASONS(X)                                                                                              \
    X(BAD_MAGIC) X(BAD_VERSION) X(UNKNOWN_KIND) X(UNKNOWN_FLAG) X(RESERVED_BITS) X(HEADER_DIGEST) X(LENGTH_BOUNDS)   \
    X(AUTH_FAILED) X(BOOT_NONCE) X(SESSION_MISMATCH) X(SLOT_BOUNDS) X(SLOT_STATE) X(GENERATION_STALE)                \
    X(GENERATION_DUPLICATE) X(ROUND_MISMATCH) X(DEPTH_MISMATCH) X(POSITION_BOUNDS) X(POSITION_DUPLICATE)             \
    X(CONTEXT_MISMATCH) X(REPRESENTATION) X(SUPPORT_BOUNDS) X(PAYLOAD_DIGEST) X(ID_RANGE) X(ID_ORDER)                \
    X(ID_DUPLICATE) X(NONFINITE) X(NEGATIVE) X(NONDYADIC) X(MASS) X(ZERO_ENTRY) X(ZERO_Q_TOKEN) X(PADDING_NONZERO)   \
    X(DRAW_MISMATCH) X(REPLY_SIZE) X(INCOMPLETE) X(IDENTITY_MISMATCH) X(SEMANTIC_MISMATCH) X(LIMITS_MISMATCH)        \
    X(TIMEOUT) X(CANCELLED) X(PEER_LOST) X(LINK_ERROR) X(RANK_DISAGREE) X(KEY_REUSE) X(OVERLOAD) X(REQUEST_UNKNOWN)  \
    X(REQUEST_DUPLICATE) X(GENERATION_EXHAUSTED) X(UNEXPECTED_KIND) X(MALFORMED) X(INVALID_WEIGHTS) X(REQUEST_MISMATCH) \
    X(CIRCUIT_OPEN) X(COPY_FAILED)

#define PP1Q_REASON_ENTRY(name) PP1Q_E_##name,
enum pp1q_reason { PP1Q_OK = 0, PP1Q_REASONS(PP1Q_REASON_ENTRY) PP1Q_E_END };
#undef PP1Q_REASON_ENTRY

/* The name of a reason code in capitals, NULL beyond the last. */
const char *pp1q_reason_name(int code);

#define PP1Q_MASS 16777216u         /* M = 2^24: the sum of a row's counts */
#define PP1Q_NO_DRAW 0xFFFFFFFFu    /* u24 of a row without a draw proof */
#define PP1Q_BLOCK 1024u            /* values per block sum kept for the draw proof */
#define PP1Q_TREE 32u               /* tokens per block of the fixed summation tree */
#define PP1Q_BUCKETS 1024u          /* linear classes of allocation remainders */
#define PP1Q_HASH_STATE_BYTES 640u  /* at least sizeof(XXH3_state_t), which is 64-byte aligned; checked at compile time */

/* How weights of a target become integers, and the two parts of their exact total W = upper/M * 2^24 + lower. */
struct pp1q_scale {
    double scale, upper, lower;
};

/* One instruction-set level. Every level computes the same bits; they differ in speed only. */
struct pp1q_ops {
    const char *name;
    uint64_t (*hash64)(const void *data, size_t length, uint64_t seed);
    void (*hash128)(const void *data, size_t length, uint64_t out[2]);
    void (*hash_reset)(void *state, uint64_t seed);
    void (*hash_update)(void *state, const void *data, size_t length);
    uint64_t (*hash_digest)(const void *state);
    /* Sum of counts of n <= PP1Q_BLOCK FP32 values; non-zero if a value is not a dyadic below 0.5 (sum is then void). */
    int (*q_sum)(const uint8_t *q, size_t n, uint64_t *sum);
    /* The same, also writing the counts. */
    int (*q_counts)(const uint8_t *q, size_t n, uint32_t *counts);
    /* Sum of n <= PP1Q_BLOCK counts; non-zero if one is so large that the sum is void. */
    int (*count_sum)(const uint32_t *counts, size_t n, uint64_t *sum);
    /* FP32 counts/M; non-zero if a count exceeds M. */
    int (*counts_q)(const uint32_t *counts, size_t n, uint8_t *q);
    /* Sums of whole tree blocks (n a multiple of PP1Q_TREE); non-zero if a weight is NaN, infinite or has its sign set. */
    int (*block_sums)(const double *weights, size_t n, double *out);
    /* Floors of w*M/total and the bucket of each remainder (n a multiple of PP1Q_TREE); returns the sum of the floors. */
    uint64_t (*floors)(const double *weights, size_t n, double total, uint32_t *counts, uint16_t *buckets);
    /* How many of n buckets (a multiple of PP1Q_TREE) are at or above each of three edges (>= 1). */
    void (*at_or_above)(const uint16_t *buckets, size_t n, const uint16_t edges[3], size_t out[3]);
    /* counts += 1 where bucket > edge; writes the indexes of bucket == edge to ids, returns how many. */
    size_t (*tickets)(uint32_t *counts, const uint16_t *buckets, size_t n, uint16_t edge, uint32_t *ids);
    /* Start of the next whole tree block at or after `from` with a weight > floor (end if none); *bad as block_sums. */
    size_t (*find_above)(const double *weights, size_t from, size_t end, double floor, int *bad);
    /* block_sums of FP32 weights at any address. */
    int (*narrow_sums)(const uint8_t *weights, size_t n, double *out);
    /* Exact sum of the integers nearest to weight * scale (FP64 weights if wide, else FP32). */
    double (*fixed_sum)(const uint8_t *weights, size_t n, int wide, double scale);
    /* Sums over tokens with p > q of w - c*upper/M and of q*lower: times M, their difference is the residual mass. */
    void (*residual)(const uint8_t *weights, const uint8_t *q, size_t n, int wide, const struct pp1q_scale *scale,
                     double out[2]);
};

extern const struct pp1q_ops pp1q_ops_base;
#if defined(__x86_64__)
extern const struct pp1q_ops pp1q_ops_avx2;
extern const struct pp1q_ops pp1q_ops_avx512;
#endif

/* The level in use. Chosen once by pp1q_level_init(); pp1q_level_select() is for tests. */
extern const struct pp1q_ops *pp1q_ops;
void pp1q_level_init(void);
/* The index-th level this CPU can run, NULL beyond the last; the best one comes last. */
const struct pp1q_ops *pp1q_level(size_t index);
int pp1q_level_select(const char *name); /* 0, or -1 if this CPU has no such level */

/* The floating-point mode every result depends on: round to nearest, denormals kept. A library loaded beside us may
 * have set flush-to-zero for the thread; enter/leave bracket a kernel so that it cannot change a count. */
uint64_t pp1q_fp_enter(void);
void pp1q_fp_leave(uint64_t saved);

/* -- rows ---------------------------------------------------------------------------------------------------------- */

/* The count of one FP32 value given as its bits: 0..M, or minus a reason (nonfinite, negative, nondyadic). */
int32_t pp1q_count_of(uint32_t bits);
/* Adds the counts of n values to *mass; the reason of the first failing value decides. */
int pp1q_q_mass(const uint8_t *q, size_t n, uint64_t *mass);
int pp1q_validate_dense(const uint8_t *row, size_t entries, size_t row_bytes, uint64_t expected_mass, int64_t token,
                        uint32_t u24);
int pp1q_validate_sparse(const uint8_t *q, const uint8_t *ids, size_t n, int64_t first_id, int64_t end_id,
                         uint64_t expected_mass, int64_t token, uint32_t u24);
/* First index whose cumulative count exceeds u24; -1 if the mass is too small, -2 if a value is not dyadic. */
int64_t pp1q_draw_counts(const uint32_t *counts, size_t n, uint32_t u24);
int64_t pp1q_draw_q(const uint8_t *q, size_t n, uint32_t u24);
int pp1q_counts_to_q(const uint32_t *counts, size_t n, uint8_t *q); /* non-zero if a count exceeds M */
int pp1q_q_to_counts(const uint8_t *q, size_t n, uint32_t *counts);

/* Digest and validation of one dense row while it lands. begin -> advance... -> finish. */
typedef struct pp1q_cursor pp1q_cursor;
pp1q_cursor *pp1q_cursor_new(void); /* NULL when out of memory */
void pp1q_cursor_free(pp1q_cursor *cursor);
int pp1q_cursor_begin(pp1q_cursor *cursor, const uint8_t *row, size_t entries, size_t row_bytes, uint64_t seed);
void pp1q_cursor_advance(pp1q_cursor *cursor, size_t landed);
int pp1q_cursor_finish(pp1q_cursor *cursor, uint64_t expected_digest, uint64_t expected_mass, int64_t token,
                       uint32_t u24, uint64_t *digest);

/* -- allocation ---------------------------------------------------------------------------------------------------- */

size_t pp1q_allocate_scratch_bytes(size_t n);
int pp1q_block_sums(const double *weights, size_t n, double *out);
double pp1q_tree_sum(double *sums, size_t n); /* destroys sums; 0.0 for n = 0 */
/* The tree over `blocks` sums, of which a shard has [first, end): writes the sums of the fewest whole nodes that make those up
 * (at most PP1Q_NODES) to out and returns how many. Destroys sums, which begin at block `first`. */
#define PP1Q_NODES 128u
size_t pp1q_tree_nodes(double *sums, size_t first, size_t end, size_t blocks, double *out);
/* The root, from the nodes of all shards in order; shard s has the blocks [edges[s], edges[s+1]), the last edge is `blocks`. */
double pp1q_tree_root(const uint32_t *edges, size_t shards, const double *nodes);
size_t pp1q_tree_node_count(size_t first, size_t end, size_t blocks);
int pp1q_allocate(const double *weights, size_t n, uint32_t *counts, void *scratch);
/* The second half of pp1q_allocate: weights known good, total >= each of them. A total that is not theirs is refused as
 * inconsistent. No bracket of the floating-point mode. */
int pp1q_allocate_over(const double *weights, size_t n, double total, uint32_t *counts, void *scratch);
size_t pp1q_top_k_scratch_bytes(size_t n, size_t k);
int64_t pp1q_top_k(const double *weights, size_t n, size_t k, int32_t *ids, void *scratch); /* or minus a reason */

/* -- verification (SPEC sections 6 and 7) ------------------------------------------------------------------------- */

__extension__ typedef unsigned __int128 pp1q_u128;

#define PP1Q_FIXED_BITS 51 /* fixed-point weights of a whole vocabulary sum to about 2^50 .. 2^51 */

/* A target's weights, or a shard of them: float or double [n] at any address, and what stands for them. The integer weight
 * of a token is the one nearest to weight * 2^exponent (ties to even); p is integer weight / total of all shards. */
typedef struct {
    const uint8_t *weights;
    size_t n;
    int wide; /* FP64, else FP32 */
    int exponent;
} pp1q_target;

/* ceil(n/32) leaves of the fixed tree; INVALID_WEIGHTS for a NaN, infinite or sign-carrying weight. */
int pp1q_target_sums(const pp1q_target *target, double *sums);
/* The exponent for weights of tree sum `sum`: sum * 2^exponent is in [2^50, 2^51). INT32_MIN for a sum without one. */
int pp1q_target_exponent(double sum);
uint64_t pp1q_target_weight(const pp1q_target *target, size_t index);
/* Sums of the integer weights of every PP1Q_BLOCK tokens; returns their total, UINT64_MAX if one is above 2^52. */
uint64_t pp1q_target_masses(const pp1q_target *target, uint64_t *masses);
/* First index whose cumulative integer weight exceeds threshold, -1 if there is none. */
int64_t pp1q_target_pick(const pp1q_target *target, const uint64_t *masses, uint64_t threshold);

/* Masses of max(p - q, 0) in units of 1/(M*W), of every PP1Q_BLOCK tokens: dense q FP32 [n], at any address. Adds the
 * counts seen to *counts and the masses to *sum; a reason if a value is no dyadic probability. */
int pp1q_residual_dense(const pp1q_target *target, uint64_t total, const uint8_t *q, pp1q_u128 *masses, uint64_t *counts,
                        pp1q_u128 *sum);
/* The same with q on ids (ascending, below n; checked: ID_RANGE, ID_DUPLICATE, ID_ORDER) and 0 elsewhere. */
int pp1q_residual_sparse(const pp1q_target *target, uint64_t total, const uint64_t *weight_masses, const uint8_t *q,
                         const uint8_t *ids, size_t entries, pp1q_u128 *masses, uint64_t *counts, pp1q_u128 *sum);
/* First index whose cumulative residual exceeds threshold, -1 if there is none. ids NULL for a dense q. */
int64_t pp1q_residual_pick(const pp1q_target *target, uint64_t total, const uint8_t *q, const uint8_t *ids, size_t entries,
                           const pp1q_u128 *masses, pp1q_u128 threshold);
/* u64 * c * W < 2^64 * M * w, exactly; total and weight below 2^63. */
int pp1q_accept(uint64_t u64, uint32_t count, uint64_t weight, uint64_t total);
/* Which of n masses noise chooses: the first whose cumulative mass exceeds floor(u64 * sum / 2^64), and in *inside what is left of
 * that threshold within it. -1 if there is no mass. */
int64_t pp1q_choose(uint64_t u64, const pp1q_u128 *masses, size_t n, pp1q_u128 *inside);
/* The count of the token `index` in q, dense (ids NULL) or sparse, 0 where q has no entry; or minus a reason. */
int32_t pp1q_count_at(const uint8_t *q, const uint8_t *ids, size_t entries, size_t index);

/* The greedy lane: of `requests` rows of `depth` drafts and `depth + 1` winners of the target (each int32, or int64 if wide)
 * the accepted prefix and the one winner after it. tokens: int64 [requests, depth + 1], -1 behind the committed ones;
 * accepted: int32 [requests]. depths: int32 [requests], how many drafts count, or NULL for all. Returns 0, or 1 + the
 * request whose depth, draft or winner is out of range (nothing is written for it or after it). */
size_t pp1q_greedy_commit(const void *drafts, int wide_drafts, const void *winners, int wide_winners, const int32_t *depths,
                          size_t requests, size_t depth, int64_t vocab_size, int64_t *tokens, int32_t *accepted);

/* -- random numbers, digests, clock -------------------------------------------------------------------------------- */

void pp1q_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
void pp1q_draw_words(uint64_t seed, uint32_t domain, uint32_t generation, uint32_t round, uint32_t position,
                     uint32_t out[4]);
void pp1q_prefix_digest(uint64_t digest[2], const int32_t *tokens, size_t n);
int64_t pp1q_monotonic_ns(void);

#endif

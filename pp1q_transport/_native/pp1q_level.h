/* The vector loops, written once: pp1q_base.c, pp1q_avx2.c and pp1q_avx512.c each include this file under their own
 * instruction set, with VECTOR_BYTES and LEVEL_NAME defined. Between those and pp1q_ops; no function here is public.
 *
 * Every loop computes bit for bit the same at every level: sums are integers, or follow the fixed summation tree.
 */
#define XXH_INLINE_ALL
#include <string.h>
#include <xxhash.h>

#include "pp1q_kernels.h"

#define LANES16 (VECTOR_BYTES / 2)
#define LANES32 (VECTOR_BYTES / 4)
#define LANES64 (VECTOR_BYTES / 8)
#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef uint32_t vu32 __attribute__((vector_size(VECTOR_BYTES)));
typedef int16_t vi16 __attribute__((vector_size(VECTOR_BYTES)));
typedef float vf32 __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t vu64 __attribute__((vector_size(VECTOR_BYTES)));
typedef double vf64 __attribute__((vector_size(VECTOR_BYTES)));
typedef double half __attribute__((vector_size(32)));
typedef double quarter __attribute__((vector_size(16)));

_Static_assert(sizeof(XXH3_state_t) <= PP1Q_HASH_STATE_BYTES, "the streaming state must fit its reserve");

static uint64_t level_hash64(const void *data, size_t length, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, length, seed);
}

static void level_hash128(const void *data, size_t length, uint64_t out[2])
{
    XXH128_hash_t digest = XXH3_128bits(data, length);
    out[0] = digest.low64;
    out[1] = digest.high64;
}

static void level_hash_reset(void *state, uint64_t seed)
{
    XXH3_64bits_reset_withSeed(state, seed);
}

static void level_hash_update(void *state, const void *data, size_t length)
{
    XXH3_64bits_update(state, data, length);
}

static uint64_t level_hash_digest(const void *state)
{
    return XXH3_64bits_digest(state);
}

#if VECTOR_BYTES == 64
#define FOLD64(v)                                                                                                    \
    do {                                                                                                             \
        FOLD_STEP(v, __builtin_shuffle(v, (vu64){4, 5, 6, 7, 4, 5, 6, 7}));                                          \
        FOLD_STEP(v, __builtin_shuffle(v, (vu64){2, 3, 2, 3, 2, 3, 2, 3}));                                          \
        FOLD_STEP(v, __builtin_shuffle(v, (vu64){1, 1, 1, 1, 1, 1, 1, 1}));                                          \
    } while (0)
#elif VECTOR_BYTES == 32
#define FOLD64(v)                                                                                                    \
    do {                                                                                                             \
        FOLD_STEP(v, __builtin_shuffle(v, (vu64){2, 3, 2, 3}));                                                      \
        FOLD_STEP(v, __builtin_shuffle(v, (vu64){1, 1, 1, 1}));                                                      \
    } while (0)
#else
#define FOLD64(v) FOLD_STEP(v, __builtin_shuffle(v, (vu64){1, 1}))
#endif

/* Sum of all 32-bit lanes in 64 bits. */
ALWAYS_INLINE uint64_t sum32(vu32 lanes)
{
    vu64 wide = ((vu64)lanes & 0xFFFFFFFFu) + ((vu64)lanes >> 32);
#define FOLD_STEP(v, w) v += (w)
    FOLD64(wide);
#undef FOLD_STEP
    return wide[0];
}

ALWAYS_INLINE uint64_t any64(vu64 lanes)
{
#define FOLD_STEP(v, w) v |= (w)
    FOLD64(lanes);
#undef FOLD_STEP
    return lanes[0];
}

ALWAYS_INLINE vf32 load_f32(const uint8_t *from)
{
    vf32 v;
    memcpy(&v, from, sizeof v);
    return v;
}

ALWAYS_INLINE vf64 load_f64(const double *from)
{
    vf64 v;
    memcpy(&v, from, sizeof v);
    return v;
}

ALWAYS_INLINE vu32 load_u32(const uint32_t *from)
{
    vu32 v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* A dyadic q = c/2^24 below 0.5 becomes q + 0.5 = (2^23 + c)/2^24 without rounding, in the binade [0.5, 1) whose last
 * place is 2^-24: so the low bits of the sum are c, and subtracting 0.5 gives back the very bits of q. Anything else
 * (rounded, negative, -0.0, >= 0.5, infinite, NaN, denormal) changes the bits or leaves the binade. */
#define HALF_BITS 0x3F000000u
#define BINADE_MASK 0xFF800000u

static int level_q_sum(const uint8_t *q, size_t n, uint64_t *sum)
{
    const vf32 half = (vf32){0} + 0.5f;
    vu32 counts[4] = {{0}}, changed[2] = {{0}}, binade[2] = {{0}};
    uint32_t tail_changed = 0;
    uint64_t tail_sum = 0;
    size_t i = 0;
    for (; i + 4 * LANES32 <= n; i += 4 * LANES32) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            vf32 value = load_f32(q + 4 * (i + (size_t)k * LANES32));
            vf32 raised = value + half;
            changed[k & 1] |= (vu32)(raised - half) ^ (vu32)value;
            vu32 count = (vu32)raised - HALF_BITS; /* below 2^23 exactly when the sum stayed in the binade */
            binade[k & 1] |= count;
            counts[k] += count;
        }
    }
    for (; i < n; i++) {
        float value, raised, back;
        uint32_t bits, raised_bits, back_bits;
        memcpy(&value, q + 4 * i, 4);
        memcpy(&bits, q + 4 * i, 4);
        raised = value + 0.5f;
        back = raised - 0.5f;
        memcpy(&raised_bits, &raised, 4);
        memcpy(&back_bits, &back, 4);
        tail_changed |= (back_bits ^ bits) | ((raised_bits ^ HALF_BITS) & BINADE_MASK);
        tail_sum += raised_bits - HALF_BITS;
    }
    /* A chain holds at most 1024/16 counts below 2^23, so neither a lane nor the sum of four lanes wraps. */
    *sum = sum32((counts[0] + counts[1]) + (counts[2] + counts[3])) + tail_sum;
    vu32 flags = changed[0] | changed[1] | ((binade[0] | binade[1]) & BINADE_MASK);
    return (any64((vu64)flags) | tail_changed) != 0;
}

static int level_q_counts(const uint8_t *q, size_t n, uint32_t *counts)
{
    uint32_t changed = 0;
    for (size_t i = 0; i < n; i++) {
        float value, raised, back;
        uint32_t bits, raised_bits, back_bits;
        memcpy(&value, q + 4 * i, 4);
        memcpy(&bits, q + 4 * i, 4);
        raised = value + 0.5f;
        back = raised - 0.5f;
        memcpy(&raised_bits, &raised, 4);
        memcpy(&back_bits, &back, 4);
        changed |= (back_bits ^ bits) | ((raised_bits ^ HALF_BITS) & BINADE_MASK);
        counts[i] = raised_bits - HALF_BITS;
    }
    return changed != 0;
}

static int level_count_sum(const uint32_t *counts, size_t n, uint64_t *sum)
{
    vu32 chains[4] = {{0}}, seen = {0};
    uint64_t tail_sum = 0;
    size_t i = 0;
    for (; i + 4 * LANES32 <= n; i += 4 * LANES32) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            vu32 value = load_u32(counts + i + (size_t)k * LANES32);
            chains[k] += value;
            seen |= value;
        }
    }
    for (; i < n; i++)
        tail_sum += counts[i];
    /* A chain holds at most 64 values; each below 2^25 (else the sum is void), so no lane wraps. */
    *sum = sum32(chains[0]) + sum32(chains[1]) + sum32(chains[2]) + sum32(chains[3]) + tail_sum;
    return any64((vu64)(seen & 0xFE000000u)) != 0;
}

static int level_counts_q(const uint32_t *counts, size_t n, uint8_t *q)
{
    uint32_t seen = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t count = counts[i];
        float value = (float)(int32_t)count * 0x1p-24f;
        seen |= count | (count + (PP1Q_MASS - 1));
        memcpy(q + 4 * i, &value, 4);
    }
    return (seen & 0xFE000000u) != 0; /* bit 25 or above: a count was larger than M */
}

/* Bit 63 of the result is set iff the double is infinite, NaN or has its sign set. */
#define UNUSABLE(bits) ((bits) | ((bits) + (UINT64_C(1) << 52)))

/* The last halvings of a tree block, within one vector: lanes i and i+4, i and i+2, i and i+1. */
ALWAYS_INLINE double halve(vf64 lanes)
{
#if VECTOR_BYTES == 16
    return lanes[0] + lanes[1];
#else
    quarter low, high;
#if VECTOR_BYTES == 64
    half lower, upper;
    memcpy(&lower, &lanes, 32);
    memcpy(&upper, (const char *)&lanes + 32, 32);
    lower += upper;
    memcpy(&low, &lower, 16);
    memcpy(&high, (const char *)&lower + 16, 16);
#else
    memcpy(&low, &lanes, 16);
    memcpy(&high, (const char *)&lanes + 16, 16);
#endif
    low += high;
    return low[0] + low[1];
#endif
}

static int level_block_sums(const double *weights, size_t n, double *out)
{
    vu64 seen = {0};
    for (size_t i = 0; i < n; i += PP1Q_TREE) {
        vf64 part[16 / LANES64];
#pragma GCC unroll 8
        for (size_t k = 0; k < 16 / LANES64; k++) {
            vf64 low = load_f64(weights + i + k * LANES64);
            vf64 high = load_f64(weights + i + 16 + k * LANES64);
            seen |= UNUSABLE((vu64)low) | UNUSABLE((vu64)high);
            part[k] = low + high;
        }
#pragma GCC unroll 4
        for (size_t half = 8 / LANES64; half > 0; half /= 2)
#pragma GCC unroll 4
            for (size_t k = 0; k < half; k++)
                part[k] += part[k + half];
        out[i / PP1Q_TREE] = halve(part[0]);
    }
    return (any64(seen) >> 63) != 0;
}

static uint64_t level_floors(const double *weights, size_t n, double total, uint32_t *counts, uint16_t *buckets)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i += PP1Q_TREE) {
        int32_t bucket[PP1Q_TREE];
        uint32_t part = 0; /* 32 floors of at most 2^24 each: no wrap */
        for (size_t k = 0; k < PP1Q_TREE; k++) {
            double scaled = weights[i + k] * (double)PP1Q_MASS / total;
            int32_t whole = (int32_t)scaled;
            counts[i + k] = (uint32_t)whole;
            part += (uint32_t)whole;
            bucket[k] = (int32_t)((scaled - (double)whole) * (double)PP1Q_BUCKETS);
        }
        sum += part;
        for (size_t k = 0; k < PP1Q_TREE; k++)
            buckets[i + k] = (uint16_t)bucket[k];
    }
    return sum;
}

/* Sum of all 16-bit lanes. */
ALWAYS_INLINE uint64_t sum16(vi16 lanes)
{
    return sum32(((vu32)lanes & 0xFFFFu) + ((vu32)lanes >> 16));
}

static void level_at_or_above(const uint16_t *buckets, size_t n, const uint16_t edges[3], size_t out[3])
{
    const size_t stretch = 4096 * LANES16; /* a lane counts to 4096 at most, then is added up */
    vi16 below[3];
    for (int e = 0; e < 3; e++) {
        below[e] = (vi16){0} + (int16_t)(edges[e] - 1);
        out[e] = 0;
    }
    for (size_t from = 0; from < n; from += stretch) {
        size_t end = n - from < stretch ? n : from + stretch;
        vi16 found[3] = {{0}};
        for (size_t i = from; i < end; i += LANES16) {
            vi16 value;
            memcpy(&value, buckets + i, sizeof value);
            for (int e = 0; e < 3; e++)
                found[e] -= value > below[e];
        }
        for (int e = 0; e < 3; e++)
            out[e] += sum16(found[e]);
    }
}

static size_t level_tickets(uint32_t *counts, const uint16_t *buckets, size_t n, uint16_t edge, uint32_t *ids)
{
    size_t found = 0, i = 0;
    for (; i + PP1Q_TREE <= n; i += PP1Q_TREE) {
        uint16_t at_edge = 0;
        for (size_t k = 0; k < PP1Q_TREE; k++) {
            counts[i + k] += buckets[i + k] > edge;
            at_edge |= buckets[i + k] == edge;
        }
        if (at_edge)
            for (size_t k = 0; k < PP1Q_TREE; k++) {
                ids[found] = (uint32_t)(i + k);
                found += buckets[i + k] == edge;
            }
    }
    for (; i < n; i++) {
        counts[i] += buckets[i] > edge;
        if (buckets[i] == edge)
            ids[found++] = (uint32_t)i;
    }
    return found;
}

static size_t level_find_above(const double *weights, size_t from, size_t end, double floor, int *bad)
{
    vu64 seen = {0};
    for (; from < end; from += PP1Q_TREE) {
        vu64 above = {0};
#pragma GCC unroll 16
        for (size_t k = 0; k < PP1Q_TREE / LANES64; k++) {
            vf64 value = load_f64(weights + from + k * LANES64);
            seen |= UNUSABLE((vu64)value);
            above |= (vu64)(value > floor);
        }
        if (any64(above))
            break;
    }
    *bad |= (any64(seen) >> 63) != 0;
    return from;
}

#include "pp1q_level_verify.h"

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

const struct pp1q_ops PASTE(pp1q_ops_, LEVEL_NAME) = {
    .name = TEXT(LEVEL_NAME),
    .hash64 = level_hash64,
    .hash128 = level_hash128,
    .hash_reset = level_hash_reset,
    .hash_update = level_hash_update,
    .hash_digest = level_hash_digest,
    .q_sum = level_q_sum,
    .q_counts = level_q_counts,
    .count_sum = level_count_sum,
    .counts_q = level_counts_q,
    .block_sums = level_block_sums,
    .floors = level_floors,
    .at_or_above = level_at_or_above,
    .tickets = level_tickets,
    .find_above = level_find_above,
    .narrow_sums = level_narrow_sums,
    .fixed_sum = level_fixed_sum,
    .residual = level_residual,
};

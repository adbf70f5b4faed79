/* Rejection sampling and the greedy commit (SPEC sections 6 and 7): between a level's passes over a whole vocabulary and
 * exact integers of up to 128 bits.
 *
 * Floating-point weights of the target become integers once (pp1q_target_exponent); from there on nothing is rounded: the
 * acceptance test, the residual and every draw are those of the integer kernel on these weights. Allocates nothing.
 */
#include <string.h>

#include "pp1q_kernels.h"

#define LIMB 24 /* M = 2^24 */

static size_t bytes_of(const pp1q_target *target)
{
    return target->wide ? 8 : 4;
}

static uint32_t word_at(const uint8_t *words, size_t index)
{
    uint32_t word;
    memcpy(&word, words + 4 * index, 4);
    return word;
}

/* 2^exponent, for a normal result. */
static double power_of_two(int exponent)
{
    uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

static int level_sums(const pp1q_target *target, const uint8_t *weights, size_t n, double *sums)
{
    double block[PP1Q_BLOCK];
    int bad = 0;
    if (!target->wide)
        return pp1q_ops->narrow_sums(weights, n, sums);
    if ((uintptr_t)weights % 8 == 0)
        return pp1q_ops->block_sums((const double *)(const void *)weights, n, sums);
    for (size_t i = 0; i < n; i += PP1Q_BLOCK) {
        size_t m = n - i < PP1Q_BLOCK ? n - i : PP1Q_BLOCK;
        memcpy(block, weights + 8 * i, 8 * m);
        bad |= pp1q_ops->block_sums(block, m, sums + i / PP1Q_TREE);
    }
    return bad;
}

int pp1q_target_sums(const pp1q_target *target, double *sums)
{
    size_t whole = target->n / PP1Q_TREE * PP1Q_TREE, size = bytes_of(target);
    uint64_t saved = pp1q_fp_enter();
    int bad = level_sums(target, target->weights, whole, sums);
    if (whole < target->n) {
        double last[PP1Q_TREE] = {0}; /* zero bytes are 0.0 in both formats */
        memcpy(last, target->weights + size * whole, size * (target->n - whole));
        bad |= level_sums(target, (const uint8_t *)last, PP1Q_TREE, sums + whole / PP1Q_TREE);
    }
    pp1q_fp_leave(saved);
    return bad ? PP1Q_E_INVALID_WEIGHTS : PP1Q_OK;
}

int pp1q_target_exponent(double sum)
{
    uint64_t bits;
    int64_t above; /* sum is in [2^(above-1), 2^above) */
    memcpy(&bits, &sum, 8);
    above = (int64_t)(bits >> 52) - 1022;
    /* Zero, infinite, NaN and negative ones (whose sign makes `above` large) have none, nor sums so far out that a factor of
     * two no longer multiplies exactly. */
    return above < -900 || above > 900 ? INT32_MIN : (int)(PP1Q_FIXED_BITS - above);
}

/* The weight as an integer: the very arithmetic of the vector loops. */
static uint64_t fixed(const pp1q_target *target, double scale, size_t index)
{
    float narrow;
    double value, raised;
    uint64_t bits;
    if (target->wide) {
        memcpy(&value, target->weights + 8 * index, 8);
    } else {
        memcpy(&narrow, target->weights + 4 * index, 4);
        value = (double)narrow;
    }
    raised = value * scale + 0x1p52;
    memcpy(&bits, &raised, 8);
    return bits - (UINT64_C(0x433) << 52);
}

uint64_t pp1q_target_weight(const pp1q_target *target, size_t index)
{
    uint64_t saved = pp1q_fp_enter();
    uint64_t weight = fixed(target, power_of_two(target->exponent), index);
    pp1q_fp_leave(saved);
    return weight;
}

uint64_t pp1q_target_masses(const pp1q_target *target, uint64_t *masses)
{
    uint64_t total = 0, saved = pp1q_fp_enter();
    double scale = power_of_two(target->exponent);
    for (size_t i = 0; i < target->n; i += PP1Q_BLOCK) {
        size_t n = target->n - i < PP1Q_BLOCK ? target->n - i : PP1Q_BLOCK;
        double sum = pp1q_ops->fixed_sum(target->weights + bytes_of(target) * i, n, target->wide, scale);
        if (!(sum <= 0x1p52)) { /* not exact any more */
            total = UINT64_MAX;
            break;
        }
        masses[i / PP1Q_BLOCK] = (uint64_t)sum;
        total += masses[i / PP1Q_BLOCK];
    }
    pp1q_fp_leave(saved);
    return total;
}

int64_t pp1q_target_pick(const pp1q_target *target, const uint64_t *masses, uint64_t threshold)
{
    uint64_t saved = pp1q_fp_enter();
    double scale = power_of_two(target->exponent);
    int64_t found = -1;
    size_t i = 0;
    while (i < target->n && threshold >= masses[i / PP1Q_BLOCK]) {
        threshold -= masses[i / PP1Q_BLOCK];
        i += PP1Q_BLOCK;
    }
    for (; i < target->n && found < 0; i++) {
        uint64_t weight = fixed(target, scale, i);
        if (threshold < weight)
            found = (int64_t)i;
        threshold -= weight;
    }
    pp1q_fp_leave(saved);
    return found;
}

int pp1q_accept(uint64_t u64, uint32_t count, uint64_t weight, uint64_t total)
{
    /* u*x < 2^64*y is floor(u*x / 2^64) < y, for an integer y. */
    pp1q_u128 x = (pp1q_u128)total * count, y = (pp1q_u128)weight << LIMB;
    return (pp1q_u128)u64 * (uint64_t)(x >> 64) + (((pp1q_u128)u64 * (uint64_t)x) >> 64) < y;
}

/* -- the residual -------------------------------------------------------------------------------------------------- */

int pp1q_residual_dense(const pp1q_target *target, uint64_t total, const uint8_t *q, pp1q_u128 *masses, uint64_t *counts,
                        pp1q_u128 *sum)
{
    uint64_t saved = pp1q_fp_enter();
    const struct pp1q_scale scale = {
        .scale = power_of_two(target->exponent),
        .upper = (double)(total >> LIMB) * (double)PP1Q_MASS,
        .lower = (double)(total & (PP1Q_MASS - 1)),
    };
    int reason = PP1Q_OK;
    for (size_t i = 0; i < target->n && !reason; i += PP1Q_BLOCK) {
        size_t n = target->n - i < PP1Q_BLOCK ? target->n - i : PP1Q_BLOCK;
        double parts[2];
        reason = pp1q_q_mass(q + 4 * i, n, counts); /* judged here while it is in the nearest cache */
        if (!reason && *counts > PP1Q_MASS)         /* sums are exact up to this mass */
            reason = PP1Q_E_MASS;
        if (reason)
            break;
        pp1q_ops->residual(target->weights + bytes_of(target) * i, q + 4 * i, n, target->wide, &scale, parts);
        masses[i / PP1Q_BLOCK] = ((pp1q_u128)(uint64_t)parts[0] << LIMB) - (uint64_t)(parts[1] * (double)PP1Q_MASS);
        *sum += masses[i / PP1Q_BLOCK];
    }
    pp1q_fp_leave(saved);
    return reason;
}

/* What q takes off the mass of one token: min(w*M, c*W). */
static pp1q_u128 taken(uint64_t weight, uint32_t count, uint64_t total)
{
    pp1q_u128 ours = (pp1q_u128)weight << LIMB, theirs = (pp1q_u128)total * count;
    return ours < theirs ? ours : theirs;
}

int pp1q_residual_sparse(const pp1q_target *target, uint64_t total, const uint64_t *weight_masses, const uint8_t *q,
                         const uint8_t *ids, size_t entries, pp1q_u128 *masses, uint64_t *counts, pp1q_u128 *sum)
{
    uint64_t saved = pp1q_fp_enter();
    double scale = power_of_two(target->exponent);
    int64_t previous = -1;
    int reason = pp1q_q_mass(q, entries, counts);
    for (size_t i = 0; i < target->n; i += PP1Q_BLOCK) {
        masses[i / PP1Q_BLOCK] = (pp1q_u128)weight_masses[i / PP1Q_BLOCK] << LIMB;
        *sum += masses[i / PP1Q_BLOCK];
    }
    for (size_t entry = 0; entry < entries && !reason; entry++) {
        int64_t id = (int32_t)word_at(ids, entry);
        if (id < 0 || (uint64_t)id >= target->n)
            reason = PP1Q_E_ID_RANGE;
        else if (id <= previous)
            reason = id == previous ? PP1Q_E_ID_DUPLICATE : PP1Q_E_ID_ORDER;
        else {
            pp1q_u128 less = taken(fixed(target, scale, (size_t)id), (uint32_t)pp1q_count_of(word_at(q, entry)), total);
            masses[id / PP1Q_BLOCK] -= less;
            *sum -= less;
            previous = id;
        }
    }
    pp1q_fp_leave(saved);
    return reason;
}

/* The first entry of ascending ids at or above `id`. */
static size_t first_entry(const uint8_t *ids, size_t entries, size_t id)
{
    size_t low = 0, high = entries;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (word_at(ids, middle) < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

int64_t pp1q_residual_pick(const pp1q_target *target, uint64_t total, const uint8_t *q, const uint8_t *ids, size_t entries,
                           const pp1q_u128 *masses, pp1q_u128 threshold)
{
    uint64_t saved = pp1q_fp_enter();
    double scale = power_of_two(target->exponent);
    int64_t found = -1;
    size_t i = 0, entry;
    while (i < target->n && threshold >= masses[i / PP1Q_BLOCK]) {
        threshold -= masses[i / PP1Q_BLOCK];
        i += PP1Q_BLOCK;
    }
    entry = ids == NULL ? i : first_entry(ids, entries, i);
    for (; i < target->n && found < 0; i++) {
        uint64_t weight = fixed(target, scale, i);
        pp1q_u128 mass = (pp1q_u128)weight << LIMB;
        if (ids == NULL || (entry < entries && word_at(ids, entry) == i))
            mass -= taken(weight, (uint32_t)pp1q_count_of(word_at(q, entry++)), total);
        if (threshold < mass)
            found = (int64_t)i;
        threshold -= mass;
    }
    pp1q_fp_leave(saved);
    return found;
}

/* -- shards ------------------------------------------------------------------------------------------------------- */

int64_t pp1q_choose(uint64_t u64, const pp1q_u128 *masses, size_t n, pp1q_u128 *inside)
{
    pp1q_u128 sum = 0, threshold;
    for (size_t i = 0; i < n; i++)
        sum += masses[i];
    threshold = (pp1q_u128)u64 * (uint64_t)(sum >> 64) + (((pp1q_u128)u64 * (uint64_t)sum) >> 64);
    for (size_t i = 0; i < n; i++) {
        if (threshold < masses[i]) {
            *inside = threshold;
            return (int64_t)i;
        }
        threshold -= masses[i];
    }
    return -1;
}

int32_t pp1q_count_at(const uint8_t *q, const uint8_t *ids, size_t entries, size_t index)
{
    size_t at = ids == NULL ? index : first_entry(ids, entries, index);
    uint32_t bits;
    if (at >= entries || (ids != NULL && word_at(ids, at) != index))
        return 0;
    bits = word_at(q, at);
    return bits == 0x80000000u ? 0 : pp1q_count_of(bits); /* -0.0 is no probability's, but it is zero */
}

/* -- the greedy lane ----------------------------------------------------------------------------------------------- */

static int64_t token_at(const void *tokens, int wide, size_t index)
{
    int32_t narrow;
    int64_t token;
    if (wide) {
        memcpy(&token, (const uint8_t *)tokens + 8 * index, 8);
        return token;
    }
    memcpy(&narrow, (const uint8_t *)tokens + 4 * index, 4);
    return narrow;
}

size_t pp1q_greedy_commit(const void *drafts, int wide_drafts, const void *winners, int wide_winners, const int32_t *depths,
                          size_t requests, size_t depth, int64_t vocab_size, int64_t *tokens, int32_t *accepted)
{
    for (size_t r = 0; r < requests; r++) {
        int64_t own = depths == NULL ? (int64_t)depth : depths[r];
        size_t kept = 0;
        int bad = own < 0 || (uint64_t)own > depth;
        for (size_t i = 0; !bad && i <= (size_t)own; i++) {
            int64_t winner = token_at(winners, wide_winners, r * (depth + 1) + i);
            int64_t draft = i < (size_t)own ? token_at(drafts, wide_drafts, r * depth + i) : 0;
            bad = winner < 0 || winner >= vocab_size || draft < 0 || draft >= vocab_size;
        }
        if (bad)
            return r + 1;
        while (kept < (size_t)own &&
               token_at(drafts, wide_drafts, r * depth + kept) == token_at(winners, wide_winners, r * (depth + 1) + kept))
            kept++;
        for (size_t i = 0; i <= depth; i++)
            tokens[r * (depth + 1) + i] = i <= kept ? token_at(winners, wide_winners, r * (depth + 1) + i) : -1;
        accepted[r] = (int32_t)kept;
    }
    return 0;
}

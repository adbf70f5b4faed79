/* Validation of rows (SPEC section 4): between a level's vector loops, which only raise flags, and one exact reason.
 *
 * The fast path sums blocks; a block that is not plainly in order is looked at value by value here. Nothing here
 * copies a row: the bytes must already be out of a peer's reach.
 */
#include <stdlib.h>
#include <string.h>

#include "pp1q_kernels.h"

#define PIECE_VALUES 64u        /* how finely a flagged block is searched */
#define CURSOR_BYTES 16384u     /* digested, then validated while they still lie in the first-level cache */

static inline uint32_t bits_at(const uint8_t *q, size_t index)
{
    uint32_t bits;
    memcpy(&bits, q + 4 * index, 4);
    return bits;
}

static inline int32_t count_of(uint32_t bits)
{
    if (bits == 0)
        return 0;
    if ((bits & 0x7F800000u) == 0x7F800000u)
        return -PP1Q_E_NONFINITE;
    if (bits >> 31)
        return -PP1Q_E_NEGATIVE;
    if (bits > 0x3F800000u) /* above 1 */
        return -PP1Q_E_NONDYADIC;
    uint32_t exponent = bits >> 23; /* value = significand * 2^(exponent - 150), count = significand * 2^(exponent - 126) */
    uint32_t significand = (bits & 0x7FFFFFu) | 0x800000u;
    if (exponent >= 126)
        return (int32_t)(significand << (exponent - 126));
    uint32_t shift = 126 - exponent;
    if (shift > 23 || (significand & ((1u << shift) - 1)) != 0)
        return -PP1Q_E_NONDYADIC;
    return (int32_t)(significand >> shift);
}

int32_t pp1q_count_of(uint32_t bits)
{
    return count_of(bits);
}

/* A flagged block: only the pieces that hold the flagged values are read one by one. */
static int q_mass_careful(const uint8_t *q, size_t n, uint64_t *mass)
{
    for (size_t i = 0; i < n; i += PIECE_VALUES) {
        size_t m = n - i < PIECE_VALUES ? n - i : PIECE_VALUES;
        uint64_t sum;
        if (pp1q_ops->q_sum(q + 4 * i, m, &sum) == 0) {
            *mass += sum;
            continue;
        }
        for (size_t k = i; k < i + m; k++) {
            int32_t count = count_of(bits_at(q, k));
            if (count < 0)
                return -count;
            *mass += (uint32_t)count;
        }
    }
    return PP1Q_OK;
}

static inline int q_mass_block(const uint8_t *q, size_t n, uint64_t *mass)
{
    uint64_t sum;
    if (__builtin_expect(pp1q_ops->q_sum(q, n, &sum) == 0, 1)) {
        *mass += sum;
        return PP1Q_OK;
    }
    return q_mass_careful(q, n, mass);
}

int pp1q_q_mass(const uint8_t *q, size_t n, uint64_t *mass)
{
    for (size_t i = 0; i < n; i += PP1Q_BLOCK) {
        size_t m = n - i < PP1Q_BLOCK ? n - i : PP1Q_BLOCK;
        int reason = q_mass_block(q + 4 * i, m, mass);
        if (reason)
            return reason;
    }
    return PP1Q_OK;
}

static int is_zero(const uint8_t *bytes, size_t n)
{
    uint8_t seen = 0;
    for (size_t i = 0; i < n; i++)
        seen |= bytes[i];
    return seen == 0;
}

/* What remains once every value is known good. `before` is the mass ahead of the token, `count` the token's own. */
static int judge(uint64_t mass, uint64_t expected_mass, int has_token, uint64_t before, uint64_t count, uint32_t u24)
{
    if (mass != expected_mass)
        return PP1Q_E_MASS;
    if (!has_token) /* a shard without the token: u24 must then fall outside its mass */
        return u24 != PP1Q_NO_DRAW && u24 < mass ? PP1Q_E_DRAW_MISMATCH : PP1Q_OK;
    if (count == 0)
        return PP1Q_E_ZERO_Q_TOKEN;
    if (u24 != PP1Q_NO_DRAW && (u24 < before || u24 >= before + count))
        return PP1Q_E_DRAW_MISMATCH;
    return PP1Q_OK;
}

int pp1q_validate_dense(const uint8_t *row, size_t entries, size_t row_bytes, uint64_t expected_mass, int64_t token,
                        uint32_t u24)
{
    uint64_t before = 0, upto, mass;
    size_t split = token >= 0 && (uint64_t)token < entries ? (size_t)token : 0;
    int reason = pp1q_q_mass(row, split, &before);
    if (reason)
        return reason;
    upto = before;
    if (entries > 0) {
        reason = pp1q_q_mass(row + 4 * split, 1, &upto);
        if (reason)
            return reason;
        mass = upto;
        reason = pp1q_q_mass(row + 4 * (split + 1), entries - split - 1, &mass);
        if (reason)
            return reason;
    } else {
        mass = 0;
    }
    if (!is_zero(row + 4 * entries, row_bytes - 4 * entries))
        return PP1Q_E_PADDING_NONZERO;
    if (mass == expected_mass && (token < -1 || (token >= 0 && (uint64_t)token >= entries)))
        return PP1Q_E_ID_RANGE;
    return judge(mass, expected_mass, token >= 0, before, upto - before, u24);
}

int pp1q_validate_sparse(const uint8_t *q, const uint8_t *ids, size_t n, int64_t first_id, int64_t end_id,
                         uint64_t expected_mass, int64_t token, uint32_t u24)
{
    uint64_t mass = 0, before = 0, own = 0;
    int64_t previous = INT64_MIN;
    for (size_t i = 0; i < n; i++) {
        int32_t id = (int32_t)bits_at(ids, i);
        int32_t count;
        if (id < first_id || id >= end_id)
            return PP1Q_E_ID_RANGE;
        if (id <= previous)
            return id == previous ? PP1Q_E_ID_DUPLICATE : PP1Q_E_ID_ORDER;
        previous = id;
        count = count_of(bits_at(q, i));
        if (count <= 0)
            return count < 0 ? -count : PP1Q_E_ZERO_ENTRY;
        if (id < token)
            before += (uint32_t)count;
        else if (id == token)
            own = (uint32_t)count;
        mass += (uint32_t)count;
    }
    if (mass == expected_mass && token != -1 && (token < first_id || token >= end_id))
        return PP1Q_E_ID_RANGE;
    return judge(mass, expected_mass, token != -1, before, own, u24);
}

int64_t pp1q_draw_counts(const uint32_t *counts, size_t n, uint32_t u24)
{
    uint64_t before = 0;
    for (size_t i = 0; i < n; i += PP1Q_BLOCK) {
        size_t m = n - i < PP1Q_BLOCK ? n - i : PP1Q_BLOCK;
        uint64_t sum;
        if (pp1q_ops->count_sum(counts + i, m, &sum) == 0 && before + sum <= u24) {
            before += sum;
            continue;
        }
        for (size_t k = i; k < i + m; k++) {
            before += counts[k];
            if (before > u24)
                return (int64_t)k;
        }
    }
    return -1;
}

int64_t pp1q_draw_q(const uint8_t *q, size_t n, uint32_t u24)
{
    uint64_t before = 0;
    for (size_t i = 0; i < n; i += PP1Q_BLOCK) {
        size_t m = n - i < PP1Q_BLOCK ? n - i : PP1Q_BLOCK;
        uint64_t sum;
        if (pp1q_ops->q_sum(q + 4 * i, m, &sum) == 0 && before + sum <= u24) {
            before += sum;
            continue;
        }
        for (size_t k = i; k < i + m; k++) {
            int32_t count = count_of(bits_at(q, k));
            if (count < 0)
                return -2;
            before += (uint32_t)count;
            if (before > u24)
                return (int64_t)k;
        }
    }
    return -1;
}

int pp1q_counts_to_q(const uint32_t *counts, size_t n, uint8_t *q)
{
    return pp1q_ops->counts_q(counts, n, q);
}

int pp1q_q_to_counts(const uint8_t *q, size_t n, uint32_t *counts)
{
    for (size_t i = 0; i < n; i += PIECE_VALUES) {
        size_t m = n - i < PIECE_VALUES ? n - i : PIECE_VALUES;
        if (pp1q_ops->q_counts(q + 4 * i, m, counts + i) == 0)
            continue;
        for (size_t k = i; k < i + m; k++) {
            int32_t count = count_of(bits_at(q, k));
            if (count < 0)
                return -count;
            counts[k] = (uint32_t)count;
        }
    }
    return PP1Q_OK;
}

/* -- the cursor ---------------------------------------------------------------------------------------------------- */

struct pp1q_cursor {
    unsigned char hash[PP1Q_HASH_STATE_BYTES] __attribute__((aligned(64)));
    const uint8_t *row;
    size_t entries, row_bytes;
    size_t landed;       /* digested so far, bytes */
    size_t checked;      /* validated so far, values */
    uint64_t mass;
    int reason;          /* of the first failing value; later values no longer matter */
    int padding_nonzero;
    uint32_t *block_sums; /* exact whenever the mass is in order */
    size_t block_capacity;
};

pp1q_cursor *pp1q_cursor_new(void)
{
    pp1q_cursor *cursor = aligned_alloc(64, (sizeof *cursor + 63) / 64 * 64);
    if (cursor != NULL)
        memset(cursor, 0, sizeof *cursor);
    return cursor;
}

void pp1q_cursor_free(pp1q_cursor *cursor)
{
    if (cursor != NULL)
        free(cursor->block_sums);
    free(cursor);
}

int pp1q_cursor_begin(pp1q_cursor *cursor, const uint8_t *row, size_t entries, size_t row_bytes, uint64_t seed)
{
    size_t blocks = entries / PP1Q_BLOCK + 1;
    if (blocks > cursor->block_capacity) {
        uint32_t *grown = realloc(cursor->block_sums, blocks * sizeof *grown);
        if (grown == NULL)
            return -1;
        cursor->block_sums = grown;
        cursor->block_capacity = blocks;
    }
    memset(cursor->block_sums, 0, blocks * sizeof *cursor->block_sums);
    cursor->row = row;
    cursor->entries = entries;
    cursor->row_bytes = row_bytes;
    cursor->landed = 0;
    cursor->checked = 0;
    cursor->mass = 0;
    cursor->reason = PP1Q_OK;
    cursor->padding_nonzero = 0;
    pp1q_ops->hash_reset(cursor->hash, seed);
    return 0;
}

/* Validates every value that is wholly among the digested bytes, block by block of the row's own grid. */
static void cursor_validate(pp1q_cursor *cursor)
{
    size_t end = cursor->landed / 4 < cursor->entries ? cursor->landed / 4 : cursor->entries;
    size_t from = cursor->checked;
    while (from < end && cursor->reason == PP1Q_OK) {
        size_t block = from / PP1Q_BLOCK;
        size_t stop = (block + 1) * PP1Q_BLOCK < end ? (block + 1) * PP1Q_BLOCK : end;
        uint64_t sum = 0;
        cursor->reason = q_mass_block(cursor->row + 4 * from, stop - from, &sum);
        cursor->block_sums[block] += (uint32_t)sum;
        cursor->mass += sum;
        from = stop;
    }
    cursor->checked = end;
}

void pp1q_cursor_advance(pp1q_cursor *cursor, size_t landed)
{
    while (cursor->landed < landed) {
        size_t from = cursor->landed, values_end = 4 * cursor->entries;
        size_t step = landed - from < CURSOR_BYTES ? landed - from : CURSOR_BYTES;
        pp1q_ops->hash_update(cursor->hash, cursor->row + from, step);
        cursor->landed = from + step;
        cursor_validate(cursor);
        if (cursor->landed > values_end) {
            size_t start = from > values_end ? from : values_end;
            cursor->padding_nonzero |= !is_zero(cursor->row + start, cursor->landed - start);
        }
    }
}

/* The mass ahead of `token`: whole blocks from their sums, the rest of its block value by value. */
static uint64_t cursor_mass_before(const pp1q_cursor *cursor, size_t token)
{
    uint64_t before = 0;
    size_t block = token / PP1Q_BLOCK;
    for (size_t i = 0; i < block; i++)
        before += cursor->block_sums[i];
    (void)pp1q_q_mass(cursor->row + 4 * block * PP1Q_BLOCK, token - block * PP1Q_BLOCK, &before);
    return before;
}

int pp1q_cursor_finish(pp1q_cursor *cursor, uint64_t expected_digest, uint64_t expected_mass, int64_t token,
                       uint32_t u24, uint64_t *digest)
{
    uint64_t before = 0, own = 0;
    *digest = pp1q_ops->hash_digest(cursor->hash);
    if (*digest != expected_digest)
        return PP1Q_E_PAYLOAD_DIGEST;
    if (cursor->reason)
        return cursor->reason;
    if (cursor->padding_nonzero)
        return PP1Q_E_PADDING_NONZERO;
    if (cursor->mass != expected_mass)
        return PP1Q_E_MASS;
    if (token < -1 || (token >= 0 && (uint64_t)token >= cursor->entries))
        return PP1Q_E_ID_RANGE;
    if (token >= 0) {
        own = (uint64_t)count_of(bits_at(cursor->row, (size_t)token));
        if (own != 0 && u24 != PP1Q_NO_DRAW)
            before = cursor_mass_before(cursor, (size_t)token);
    }
    return judge(cursor->mass, expected_mass, token >= 0, before, own, u24);
}

/* The C kernels under libFuzzer, with address and undefined-behaviour sanitizers: any bytes, in allocations of exact size.
 *
 * The first byte chooses a kernel. Two things are judged beside what the sanitizers see: every instruction-set level gives the
 * same bits, and a row or an allocation that passes is what it claims to be. scripts/check-fuzz.sh builds it.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pp1q_kernels.h"

#define MUST(what)                                                                                                   \
    do {                                                                                                             \
        if (!(what)) {                                                                                               \
            fprintf(stderr, "fuzz_kernels: level %s, line %d: %s\n", pp1q_ops->name, __LINE__, #what);               \
            abort();                                                                                                 \
        }                                                                                                            \
    } while (0)

/* GCC compiles what is shipped, so it compiles this; it tells of branches by this call, and libFuzzer looks at this section. */
#define COUNTERS 16384u
static uint8_t counters[COUNTERS] __attribute__((section("__libfuzzer_extra_counters")));
void __sanitizer_cov_trace_pc(void);
void __sanitizer_cov_trace_cmpf(float, float);
void __sanitizer_cov_trace_cmpd(double, double);
void __sanitizer_cov_trace_cmpf(float a, float b) { (void)a, (void)b; } /* libFuzzer has none of these */
void __sanitizer_cov_trace_cmpd(double a, double b) { (void)a, (void)b; }

__attribute__((no_sanitize_coverage, no_sanitize("address", "undefined"))) void __sanitizer_cov_trace_pc(void)
{
    uintptr_t place = (uintptr_t)__builtin_return_address(0) - (uintptr_t)&__sanitizer_cov_trace_pc;
    uint8_t *counter = &counters[(place * UINT64_C(0x9E3779B97F4A7C15)) >> 50];
    *counter = (uint8_t)(*counter + (*counter != 255));
}

struct input {
    const uint8_t *at;
    size_t left;
};

static uint64_t number(struct input *in, size_t bytes)
{
    uint64_t value = 0;
    size_t take = bytes < in->left ? bytes : in->left;
    memcpy(&value, in->at, take);
    in->at += take;
    in->left -= take;
    return value;
}

/* What is left, as `size` bytes that begin `lead` bytes into an allocation and end with it; free *whole. */
static uint8_t *copied(const struct input *in, size_t size, size_t lead, uint8_t **whole)
{
    *whole = malloc(size + lead + 1);
    MUST(*whole != NULL && size <= in->left);
    uint8_t *place = realloc(*whole, size + lead ? size + lead : 1);
    MUST(place != NULL);
    *whole = place;
    memcpy(place + lead, in->at, size);
    return place + lead;
}

static void *obtain(size_t size)
{
    void *memory = malloc(size ? size : 1);
    MUST(memory != NULL);
    return memory;
}

static int known(int reason) { return reason == 0 || pp1q_reason_name(reason) != NULL; }

static uint32_t bits_at(const uint8_t *q, size_t index)
{
    uint32_t bits;
    memcpy(&bits, q + 4 * index, 4);
    return bits;
}

/* Results of one kernel at one level, to be compared with those of the others. */
struct result {
    int64_t value;
    uint64_t digest;
};

static uint64_t digest_of(const void *data, size_t size) { return pp1q_ops->hash64(data, size, 0); }

static struct result dense(struct input in)
{
    uint64_t mass = number(&in, 1) & 1 ? PP1Q_MASS : number(&in, 4);
    uint32_t u24 = number(&in, 1) & 1 ? (uint32_t)number(&in, 3) : PP1Q_NO_DRAW;
    int64_t token = (int64_t)(int32_t)number(&in, 4);
    size_t lead = number(&in, 1) & 7, cut = number(&in, 1), step = 1 + number(&in, 2), size = in.left;
    size_t entries = size / 4 > cut % 32 ? size / 4 - cut % 32 : size / 4;
    uint8_t *whole, *row = copied(&in, size, lead, &whole);
    struct result r = {pp1q_validate_dense(row, entries, size, mass, token, u24), 0};
    MUST(known((int)r.value));
    pp1q_cursor *cursor = pp1q_cursor_new();
    MUST(cursor != NULL);
    uint64_t seed = mass ^ (uint64_t)token, expected = pp1q_ops->hash64(row, size, seed);
    MUST(pp1q_cursor_begin(cursor, row, entries, size, seed) == 0);
    for (size_t landed = 0; landed < size;) {
        landed = step < size - landed ? landed + step : size;
        pp1q_cursor_advance(cursor, landed);
    }
    MUST(pp1q_cursor_finish(cursor, expected, mass, token, u24, &r.digest) == r.value);
    MUST(r.digest == expected);
    pp1q_cursor_free(cursor);
    if (r.value == 0) {
        uint64_t sum = 0;
        for (size_t i = 0; i < entries; i++) {
            MUST(pp1q_count_of(bits_at(row, i)) >= 0);
            sum += (uint64_t)pp1q_count_of(bits_at(row, i));
        }
        MUST(sum == mass);
        if (token >= 0 && (size_t)token < entries && u24 != PP1Q_NO_DRAW)
            MUST(pp1q_draw_q(row, entries, u24) == token);
    }
    free(whole);
    return r;
}

static struct result sparse(struct input in)
{
    uint64_t mass = number(&in, 1) & 1 ? PP1Q_MASS : number(&in, 4);
    uint32_t u24 = number(&in, 1) & 1 ? (uint32_t)number(&in, 3) : PP1Q_NO_DRAW;
    int64_t token = (int64_t)(int32_t)number(&in, 4), first = (int64_t)number(&in, 2), end = first + (int64_t)number(&in, 2);
    size_t n = in.left / 8;
    uint8_t *whole_q, *q = copied(&in, 4 * n, 1, &whole_q), *whole_ids, *ids;
    in.at += 4 * n;
    in.left -= 4 * n;
    ids = copied(&in, 4 * n, 3, &whole_ids);
    struct result r = {pp1q_validate_sparse(q, ids, n, first, end, mass, token, u24), 0};
    MUST(known((int)r.value));
    if (r.value == 0) {
        uint64_t sum = 0;
        int64_t before = first - 1;
        for (size_t i = 0; i < n; i++) {
            int64_t id = (int32_t)bits_at(ids, i);
            MUST(id > before && id < end && pp1q_count_of(bits_at(q, i)) > 0);
            before = id;
            sum += (uint64_t)pp1q_count_of(bits_at(q, i));
        }
        MUST(sum == mass);
    }
    free(whole_q);
    free(whole_ids);
    return r;
}

/* Weights of a spread that random bytes alone would hardly have: by the first byte, as they are or small integers. */
static double *weights_of(struct input *in, size_t *n)
{
    int plain = (int)number(in, 1) & 3;
    double *weights;
    if (plain == 0) {
        *n = in->left / 8;
        weights = obtain(*n * 8);
        memcpy(weights, in->at, *n * 8);
        return weights;
    }
    *n = in->left;
    weights = obtain(*n * 8);
    for (size_t i = 0; i < *n; i++)
        weights[i] = plain == 1 ? in->at[i] : plain == 2 ? (double)in->at[i] * 1e-308 : (double)in->at[i] * 1e300;
    return weights;
}

static struct result allocate(struct input in)
{
    size_t n;
    double *weights = weights_of(&in, &n);
    if (n == 0) {
        free(weights);
        return (struct result){0, 0};
    }
    uint32_t *counts = obtain(n * 4);
    void *scratch = obtain(pp1q_allocate_scratch_bytes(n));
    struct result r = {pp1q_allocate(weights, n, counts, scratch), 0};
    MUST(known((int)r.value));
    if (r.value == 0) {
        uint64_t sum = 0;
        for (size_t i = 0; i < n; i++) {
            MUST(counts[i] == 0 || weights[i] > 0);
            sum += counts[i];
        }
        MUST(sum == PP1Q_MASS);
        for (uint32_t u24 = 0; u24 < PP1Q_MASS; u24 += 4194301) {
            int64_t at = pp1q_draw_counts(counts, n, u24);
            MUST(at >= 0 && (size_t)at < n && counts[at] > 0);
        }
        r.digest = digest_of(counts, n * 4);
    }
    free(scratch);
    free(counts);
    free(weights);
    return r;
}

static struct result top_k(struct input in)
{
    size_t k = 1 + number(&in, 1), n;
    double *weights = weights_of(&in, &n);
    if (n == 0) {
        free(weights);
        return (struct result){0, 0};
    }
    k = k < n ? k : n;
    int32_t *ids = obtain(k * 4);
    void *scratch = obtain(pp1q_top_k_scratch_bytes(n, k));
    struct result r = {pp1q_top_k(weights, n, k, ids, scratch), 0};
    MUST(r.value >= 0 ? (size_t)r.value <= k : known((int)-r.value));
    for (int64_t i = 0; i < r.value; i++)
        MUST(ids[i] >= 0 && (size_t)ids[i] < n && (i == 0 || ids[i] > ids[i - 1]) && weights[ids[i]] >= 0);
    if (r.value > 0)
        r.digest = digest_of(ids, (size_t)r.value * 4);
    free(scratch);
    free(ids);
    free(weights);
    return r;
}

static struct result draw(struct input in)
{
    uint32_t u24 = (uint32_t)number(&in, 3);
    size_t n = in.left / 4;
    uint8_t *whole, *q = copied(&in, 4 * n, 0, &whole);
    uint32_t *counts = obtain(4 * n);
    uint64_t sum = 0;
    int64_t naive = -1;
    memcpy(counts, q, 4 * n);
    for (size_t i = 0; i < n; i++)
        counts[i] &= 0xFFFFFFu;
    for (size_t i = 0; i < n && naive < 0; i++)
        naive = (sum += counts[i]) > u24 ? (int64_t)i : -1;
    struct result r = {pp1q_draw_counts(counts, n, u24), 0};
    MUST(r.value == naive);
    r.digest = (uint64_t)pp1q_draw_q(q, n, u24);
    int reason = pp1q_q_to_counts(q, n, counts);
    MUST(known(reason));
    if (reason == 0) {
        MUST(pp1q_draw_counts(counts, n, u24) == (int64_t)r.digest);
        MUST(pp1q_counts_to_q(counts, n, whole) == 0 && memcmp(whole, in.at, 4 * n) == 0);
    }
    r.digest = r.digest * 64 + (uint64_t)reason;
    free(counts);
    free(whole);
    return r;
}

static struct result digest(struct input in)
{
    uint64_t seed = number(&in, 8), in_parts[2] = {0, 0}, at_once[2] = {0, 0}, wide[2];
    size_t cut = number(&in, 2), lead = number(&in, 1) & 7, size = in.left;
    uint8_t *whole, *data = copied(&in, size, lead, &whole);
    cut = cut < size ? cut : size;
    void *state = aligned_alloc(64, PP1Q_HASH_STATE_BYTES);
    MUST(state != NULL);
    struct result r = {0, pp1q_ops->hash64(data, size, seed)};
    pp1q_ops->hash_reset(state, seed);
    pp1q_ops->hash_update(state, data, cut);
    pp1q_ops->hash_update(state, data + cut, size - cut);
    MUST(pp1q_ops->hash_digest(state) == r.digest);
    pp1q_ops->hash128(data, size, wide);
    int32_t *tokens = obtain(size / 4 * 4);
    memcpy(tokens, data, size / 4 * 4);
    pp1q_prefix_digest(at_once, tokens, size / 4);
    pp1q_prefix_digest(in_parts, tokens, cut / 4);
    pp1q_prefix_digest(in_parts, tokens + cut / 4, size / 4 - cut / 4);
    MUST(memcmp(at_once, in_parts, 16) == 0);
    r.value = (int64_t)(wide[0] ^ wide[1] ^ at_once[0] ^ at_once[1]);
    free(tokens);
    free(state);
    free(whole);
    return r;
}

/* A target's weights and a q over them: the verifier's side. */
static struct result residual(struct input in)
{
    int wide = (int)number(&in, 1) & 1;
    size_t each = wide ? 8 : 4, n = in.left / (each + 4), blocks = (n + PP1Q_TREE - 1) / PP1Q_TREE;
    uint8_t *whole, *weights = copied(&in, n * each, 1, &whole), *whole_q, *q;
    in.at += n * each;
    in.left -= n * each;
    q = copied(&in, 4 * n, 3, &whole_q);
    pp1q_target target = {.weights = weights, .n = n, .wide = wide};
    double *sums = obtain(blocks * 8);
    struct result r = {n ? pp1q_target_sums(&target, sums) : PP1Q_E_INVALID_WEIGHTS, 0};
    MUST(known((int)r.value));
    if (r.value == 0) {
        target.exponent = pp1q_target_exponent(pp1q_tree_sum(sums, blocks));
        r.value = target.exponent;
        if (target.exponent != INT32_MIN) {
            uint64_t *weight_masses = obtain((n / PP1Q_BLOCK + 1) * 8), counts = 0;
            pp1q_u128 *masses = obtain((n / PP1Q_BLOCK + 1) * 16), sum = 0;
            uint64_t total = pp1q_target_masses(&target, weight_masses);
            MUST(total != UINT64_MAX && total > 0);
            int64_t last = pp1q_target_pick(&target, weight_masses, total - 1);
            MUST(last >= 0 && (size_t)last < n && pp1q_target_pick(&target, weight_masses, total) == -1);
            int reason = pp1q_residual_dense(&target, total, q, masses, &counts, &sum);
            MUST(known(reason));
            if (reason == 0 && sum > 0) {
                int64_t at = pp1q_residual_pick(&target, total, q, NULL, 0, masses, sum - 1);
                MUST(at >= 0 && (size_t)at < n);
                MUST(pp1q_residual_pick(&target, total, q, NULL, 0, masses, sum) == -1);
            }
            r.digest = total ^ (uint64_t)sum ^ counts ^ (uint64_t)reason << 56;
            free(masses);
            free(weight_masses);
        }
    }
    free(sums);
    free(whole_q);
    free(whole);
    return r;
}

static struct result commit(struct input in)
{
    int wide = (int)number(&in, 1) & 3;
    size_t depth = 1 + (number(&in, 1) & 7), drafted = (wide & 1 ? 8 : 4) * depth, won = (wide & 2 ? 8 : 4) * (depth + 1);
    int64_t vocab = (int64_t)number(&in, 2) + 1;
    size_t requests = in.left / (drafted + won + 4);
    int64_t *tokens = obtain(requests * (depth + 1) * 8);
    int32_t *accepted = obtain(requests * 4), *depths = obtain(requests * 4);
    void *drafts = obtain(requests * drafted), *winners = obtain(requests * won);
    memcpy(drafts, in.at, requests * drafted);
    memcpy(winners, in.at + requests * drafted, requests * won);
    memcpy(depths, in.at + requests * (drafted + won), requests * 4);
    size_t bad = pp1q_greedy_commit(drafts, wide & 1, winners, wide >> 1, depths, requests, depth, vocab, tokens, accepted);
    MUST(bad <= requests);
    for (size_t i = 0; i < (bad ? bad - 1 : requests); i++)
        MUST(accepted[i] >= 0 && accepted[i] <= depths[i] && (size_t)accepted[i] <= depth);
    struct result r = {(int64_t)bad, 0};
    free(winners);
    free(drafts);
    free(depths);
    free(accepted);
    free(tokens);
    return r;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct result (*const kernels[])(struct input) = {dense, sparse, allocate, top_k, draw, digest, residual, commit};
    struct result first = {0, 0};
    if (size < 2)
        return 0;
    if (pp1q_ops == NULL)
        pp1q_level_init();
    for (size_t index = 0; pp1q_level(index) != NULL; index++) {
        pp1q_level_select(pp1q_level(index)->name);
        struct result r = kernels[data[0] % 8]((struct input){data + 1, size - 1});
        if (index == 0)
            first = r;
        MUST(r.value == first.value && r.digest == first.digest);
    }
    return 0;
}

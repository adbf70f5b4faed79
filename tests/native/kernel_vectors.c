/* Runs a file of vectors, made by kernel_vectors.py from the plain-Python oracle, through every C kernel without Python:
 * so the same bits can be asked of another architecture under emulation.
 *
 * usage: kernel_vectors FILE LEVEL|all [flush]      "flush" sets flush-to-zero first, which must change nothing.
 * Prints one line a level and kernel; exit status 0 only if every vector agrees.
 *
 * File: "PP1QVEC1", u64 records; a record: u32 kernel, u32 n_params, u32 n_blobs, u32 0, u64 params[], then per blob
 * u64 length and the bytes, zero-filled to a multiple of 8. All little-endian.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pp1q_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KERNELS(X)                                                                                                   \
    X(hash64) X(hash128) X(prefix) X(dense) X(cursor) X(sparse) X(draw_counts) X(draw_q) X(counts_to_q)              \
    X(q_to_counts) X(allocate) X(inconsistent) X(tree) X(top_k) X(philox) X(draw_words) X(target) X(residual)        \
    X(accept) X(choose) X(count) X(commit)

struct record {
    uint64_t params[16];
    const uint8_t *blob[2];
    size_t bytes[2];
};

static void *obtain(size_t bytes)
{
    void *memory = malloc(bytes ? bytes : 1);
    if (memory == NULL)
        exit(3);
    return memory;
}

/* A copy at an odd address, with nothing behind it: for kernels that may not assume alignment. */
static uint8_t *misplaced(const struct record *r, int which, uint8_t **whole)
{
    *whole = obtain(r->bytes[which] + 1);
    memcpy(*whole + 1, r->blob[which], r->bytes[which]);
    return *whole + 1;
}

static int run_hash64(const struct record *r)
{
    return pp1q_ops->hash64(r->blob[0], r->bytes[0], r->params[0]) == r->params[1];
}

static int run_hash128(const struct record *r)
{
    uint64_t out[2];
    pp1q_ops->hash128(r->blob[0], r->bytes[0], out);
    return out[0] == r->params[0] && out[1] == r->params[1];
}

static int run_prefix(const struct record *r)
{
    uint64_t digest[2] = {r->params[0], r->params[1]};
    pp1q_prefix_digest(digest, (const int32_t *)r->blob[0], r->bytes[0] / 4);
    return digest[0] == r->params[2] && digest[1] == r->params[3];
}

/* params: entries, mass, token, u24, seed, digest, reason */
static int run_dense(const struct record *r)
{
    uint8_t *whole, *row = misplaced(r, 0, &whole);
    int reason = pp1q_validate_dense(row, r->params[0], r->bytes[0], r->params[1], (int64_t)r->params[2],
                                     (uint32_t)r->params[3]);
    free(whole);
    return reason == (int)r->params[6];
}

static int run_cursor(const struct record *r)
{
    static const size_t steps[] = {SIZE_MAX, 16384, 1021, 4099, 7};
    uint8_t *whole, *row = misplaced(r, 0, &whole);
    pp1q_cursor *cursor = pp1q_cursor_new();
    uint64_t digest;
    int good = cursor != NULL;
    for (size_t i = 0; i < sizeof steps / sizeof *steps && good; i++) {
        good = pp1q_cursor_begin(cursor, row, r->params[0], r->bytes[0], r->params[4]) == 0;
        for (size_t landed = 0; landed < r->bytes[0];) {
            landed = steps[i] < r->bytes[0] - landed ? landed + steps[i] : r->bytes[0];
            pp1q_cursor_advance(cursor, landed);
        }
        good = good && pp1q_cursor_finish(cursor, r->params[5], r->params[1], (int64_t)r->params[2],
                                          (uint32_t)r->params[3], &digest) == (int)r->params[6] &&
               digest == r->params[5];
    }
    pp1q_cursor_free(cursor);
    free(whole);
    return good;
}

/* params: first, end, mass, token, u24, reason; blobs: q, ids */
static int run_sparse(const struct record *r)
{
    uint8_t *whole_q, *whole_ids, *q = misplaced(r, 0, &whole_q), *ids = misplaced(r, 1, &whole_ids);
    int reason = pp1q_validate_sparse(q, ids, r->bytes[0] / 4, (int64_t)r->params[0], (int64_t)r->params[1],
                                      r->params[2], (int64_t)r->params[3], (uint32_t)r->params[4]);
    free(whole_q);
    free(whole_ids);
    return reason == (int)r->params[5];
}

static int run_draw_counts(const struct record *r)
{
    return pp1q_draw_counts((const uint32_t *)r->blob[0], r->bytes[0] / 4, (uint32_t)r->params[0]) ==
           (int64_t)r->params[1];
}

static int run_draw_q(const struct record *r)
{
    return pp1q_draw_q(r->blob[0], r->bytes[0] / 4, (uint32_t)r->params[0]) == (int64_t)r->params[1];
}

static int run_counts_to_q(const struct record *r)
{
    uint8_t *q = obtain(r->bytes[0]);
    int good = pp1q_counts_to_q((const uint32_t *)r->blob[0], r->bytes[0] / 4, q) == 0 &&
               memcmp(q, r->blob[1], r->bytes[1]) == 0;
    free(q);
    return good;
}

static int run_q_to_counts(const struct record *r)
{
    uint32_t *counts = obtain(r->bytes[0]);
    int good = pp1q_q_to_counts(r->blob[0], r->bytes[0] / 4, counts) == (int)r->params[0] &&
               memcmp(counts, r->blob[1], r->bytes[1]) == 0;
    free(counts);
    return good;
}

static int run_allocate(const struct record *r)
{
    size_t n = r->bytes[0] / 8;
    uint32_t *counts = obtain(n * 4);
    void *scratch = obtain(pp1q_allocate_scratch_bytes(n));
    int good = pp1q_allocate((const double *)r->blob[0], n, counts, scratch) == (int)r->params[0] &&
               memcmp(counts, r->blob[1], r->bytes[1]) == 0;
    free(counts);
    free(scratch);
    return good;
}

/* params: reason, bits of a total that is not the tree's */
static int run_inconsistent(const struct record *r)
{
    size_t n = r->bytes[0] / 8;
    uint32_t *counts = obtain(n * 4);
    void *scratch = obtain(pp1q_allocate_scratch_bytes(n));
    double total;
    int good;
    memcpy(&total, &r->params[1], 8);
    good = pp1q_allocate_over((const double *)r->blob[0], n, total, counts, scratch) == (int)r->params[0];
    free(counts);
    free(scratch);
    return good;
}

/* The root again, from the nodes of three shards of the blocks. */
static int same_over_shards(const uint8_t *block_sums, size_t blocks, uint64_t expected)
{
    const uint32_t edges[4] = {0, (uint32_t)(blocks / 3), (uint32_t)(blocks - blocks / 4), (uint32_t)blocks};
    double nodes[3 * PP1Q_NODES], *sums = obtain(blocks * 8), root;
    size_t held = 0;
    for (int s = 0; s < 3; s++) {
        size_t own = edges[s + 1] - edges[s], before = held;
        memcpy(sums, block_sums + 8 * (size_t)edges[s], 8 * own);
        held += pp1q_tree_nodes(sums, edges[s], edges[s + 1], blocks, nodes + held);
        if (held - before != pp1q_tree_node_count(edges[s], edges[s + 1], blocks))
            return 0;
    }
    free(sums);
    root = pp1q_tree_root(edges, 3, nodes);
    return memcmp(&root, &expected, 8) == 0;
}

/* params: reason, bits of the root; blobs: weights, block sums (empty if refused). Not under "flush": no bracket here. */
static int run_tree(const struct record *r)
{
    size_t n = r->bytes[0] / 8, blocks = (n + PP1Q_TREE - 1) / PP1Q_TREE;
    double *sums = obtain(blocks * 8), root;
    int good = pp1q_block_sums((const double *)r->blob[0], n, sums) == (int)r->params[0];
    if (good && r->params[0] == 0) {
        good = memcmp(sums, r->blob[1], r->bytes[1]) == 0;
        root = pp1q_tree_sum(sums, blocks);
        good = good && memcmp(&root, &r->params[1], 8) == 0 && same_over_shards(r->blob[1], blocks, r->params[1]);
    }
    free(sums);
    return good;
}

/* params: k, result; blobs: weights, ids */
static int run_top_k(const struct record *r)
{
    size_t n = r->bytes[0] / 8, k = r->params[0] < n ? (size_t)r->params[0] : n;
    int32_t *ids = obtain(k * 4);
    void *scratch = obtain(pp1q_top_k_scratch_bytes(n, k));
    int good = pp1q_top_k((const double *)r->blob[0], n, k, ids, scratch) == (int64_t)r->params[1] &&
               memcmp(ids, r->blob[1], r->bytes[1]) == 0;
    free(ids);
    free(scratch);
    return good;
}

static int same_words(const uint32_t out[4], const uint64_t *expected)
{
    return out[0] == expected[0] && out[1] == expected[1] && out[2] == expected[2] && out[3] == expected[3];
}

static int run_philox(const struct record *r)
{
    uint32_t counter[4], key[2], out[4];
    for (int i = 0; i < 4; i++)
        counter[i] = (uint32_t)r->params[i];
    for (int i = 0; i < 2; i++)
        key[i] = (uint32_t)r->params[4 + i];
    pp1q_philox4x32(counter, key, out);
    return same_words(out, r->params + 6);
}

static int run_draw_words(const struct record *r)
{
    uint32_t out[4];
    pp1q_draw_words(r->params[0], (uint32_t)r->params[1], (uint32_t)r->params[2], (uint32_t)r->params[3],
                    (uint32_t)r->params[4], out);
    return same_words(out, r->params + 5);
}

/* params: wide, reason, exponent, total, threshold, index; blobs: weights, integer weights (empty if refused) */
static int run_target(const struct record *r)
{
    uint8_t *whole, *weights = misplaced(r, 0, &whole);
    pp1q_target target = {.weights = weights, .n = r->bytes[0] / (r->params[0] ? 8 : 4), .wide = (int)r->params[0]};
    size_t blocks = (target.n + PP1Q_TREE - 1) / PP1Q_TREE;
    double *sums = obtain(blocks * 8);
    uint64_t *masses = obtain((target.n / PP1Q_BLOCK + 1) * 8), expected;
    int reason = pp1q_target_sums(&target, sums), good;
    if (!reason) {
        target.exponent = pp1q_target_exponent(pp1q_tree_sum(sums, blocks));
        if (target.exponent == INT32_MIN)
            reason = PP1Q_E_INVALID_WEIGHTS;
    }
    good = reason == (int)r->params[1];
    if (good && !reason) {
        good = target.exponent == (int)(int64_t)r->params[2] && pp1q_target_masses(&target, masses) == r->params[3] &&
               pp1q_target_pick(&target, masses, r->params[4]) == (int64_t)r->params[5];
        for (size_t i = 0; i < target.n; i++) {
            memcpy(&expected, r->blob[1] + 8 * i, 8);
            good = good && pp1q_target_weight(&target, i) == expected;
        }
    }
    free(masses);
    free(sums);
    free(whole);
    return good;
}

/* params: wide, exponent, entries (0: dense), weights, reason, counts, mass high and low, threshold high and low, index;
 * blobs: weights, q and then the IDs */
static int run_residual(const struct record *r)
{
    uint8_t *whole, *weights = misplaced(r, 0, &whole), *whole_q, *q = misplaced(r, 1, &whole_q);
    pp1q_target target = {.weights = weights, .n = r->params[3], .wide = (int)r->params[0],
                          .exponent = (int)(int64_t)r->params[1]};
    size_t entries = r->params[2], blocks = target.n / PP1Q_BLOCK + 1;
    const uint8_t *ids = entries ? q + 4 * entries : NULL;
    uint64_t *weight_masses = obtain(blocks * 8), counts = 0, total = pp1q_target_masses(&target, weight_masses);
    pp1q_u128 *masses = obtain(blocks * 16), sum = 0;
    int reason = ids == NULL ? pp1q_residual_dense(&target, total, q, masses, &counts, &sum)
                             : pp1q_residual_sparse(&target, total, weight_masses, q, ids, entries, masses, &counts, &sum);
    int good = reason == (int)r->params[4];
    if (good && !reason)
        good = counts == r->params[5] && (uint64_t)(sum >> 64) == r->params[6] && (uint64_t)sum == r->params[7] &&
               pp1q_residual_pick(&target, total, q, ids, entries, masses,
                                  (pp1q_u128)r->params[8] << 64 | r->params[9]) == (int64_t)r->params[10];
    free(masses);
    free(weight_masses);
    free(whole);
    free(whole_q);
    return good;
}

static int run_accept(const struct record *r)
{
    return pp1q_accept(r->params[0], (uint32_t)r->params[1], r->params[2], r->params[3]) == (int)r->params[4];
}

/* params: noise, index, what is left inside (high, low); blob: masses, low word first */
static int run_choose(const struct record *r)
{
    size_t n = r->bytes[0] / 16;
    pp1q_u128 *masses = obtain(r->bytes[0]), inside = 0;
    int good;
    for (size_t i = 0; i < n; i++) {
        uint64_t words[2];
        memcpy(words, r->blob[0] + 16 * i, 16);
        masses[i] = (pp1q_u128)words[1] << 64 | words[0];
    }
    good = pp1q_choose(r->params[0], masses, n, &inside) == (int64_t)r->params[1] &&
           inside == ((pp1q_u128)r->params[2] << 64 | r->params[3]);
    free(masses);
    return good;
}

/* params: sparse, token, count or minus a reason; blobs: values, IDs */
static int run_count(const struct record *r)
{
    uint8_t *whole, *q = misplaced(r, 0, &whole);
    int32_t found = pp1q_count_at(q, r->params[0] ? r->blob[1] : NULL, r->bytes[0] / 4, r->params[1]);
    free(whole);
    return found == (int32_t)(int64_t)r->params[2];
}

/* params: wide drafts, wide winners, depth, vocabulary, result, accepted, up to 8 tokens; blobs: drafts, winners */
static int run_commit(const struct record *r)
{
    size_t depth = r->params[2];
    int64_t tokens[9];
    int32_t accepted = -1;
    uint8_t *whole, *drafts = misplaced(r, 0, &whole);
    int good = depth < 9 && pp1q_greedy_commit(drafts, (int)r->params[0], r->blob[1], (int)r->params[1], NULL, 1, depth,
                                               (int64_t)r->params[3], tokens, &accepted) == r->params[4];
    if (good && r->params[4] == 0) {
        good = accepted == (int32_t)r->params[5];
        for (size_t i = 0; i <= depth; i++)
            good = good && tokens[i] == (int64_t)r->params[6 + i];
    }
    free(whole);
    return good;
}

#define ENTRY(name) {#name, run_##name},
static const struct {
    const char *name;
    int (*run)(const struct record *);
} table[] = {KERNELS(ENTRY)};
#define N_KERNELS (sizeof table / sizeof *table)

static uint8_t *read_file(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    uint8_t *data;
    long length;
    if (file == NULL || fseek(file, 0, SEEK_END) != 0 || (length = ftell(file)) < 16 || fseek(file, 0, SEEK_SET) != 0)
        exit(3);
    data = obtain((size_t)length);
    if (fread(data, 1, (size_t)length, file) != (size_t)length || memcmp(data, "PP1QVEC1", 8) != 0)
        exit(3);
    fclose(file);
    *size = (size_t)length;
    return data;
}

static const uint8_t *parse(const uint8_t *at, const uint8_t *end, struct record *r, uint32_t *kernel)
{
    uint32_t head[4];
    if ((size_t)(end - at) < sizeof head)
        exit(3);
    memcpy(head, at, sizeof head);
    at += sizeof head;
    if (head[0] >= N_KERNELS || head[1] > 16 || head[2] > 2 || (size_t)(end - at) < 8 * (size_t)head[1])
        exit(3);
    *kernel = head[0];
    memcpy(r->params, at, 8 * (size_t)head[1]);
    at += 8 * (size_t)head[1];
    for (uint32_t i = 0; i < head[2]; i++) {
        uint64_t length;
        memcpy(&length, at, 8);
        at += 8;
        if (length > (uint64_t)(end - at))
            exit(3);
        r->blob[i] = at;
        r->bytes[i] = (size_t)length;
        at += (length + 7) / 8 * 8;
    }
    return at;
}

static int run_level(const uint8_t *data, size_t size, int flush)
{
    unsigned long passed[N_KERNELS] = {0}, failed[N_KERNELS] = {0}, bad = 0;
    const uint8_t *at = data + 16, *end = data + size;
    uint64_t records;
    memcpy(&records, data + 8, 8);
    for (uint64_t i = 0; i < records; i++) {
        struct record r;
        uint32_t kernel;
        memset(&r, 0, sizeof r);
        at = parse(at, end, &r, &kernel);
        if (flush && table[kernel].run == run_tree)
            continue;
        if (table[kernel].run(&r)) {
            passed[kernel]++;
        } else if (failed[kernel]++ < 3) {
            printf("%s: record %llu of %s differs\n", pp1q_ops->name, (unsigned long long)i, table[kernel].name);
        }
    }
    for (size_t k = 0; k < N_KERNELS; k++) {
        printf("%s%s %s passed=%lu failed=%lu\n", pp1q_ops->name, flush ? "+flush" : "", table[k].name, passed[k],
               failed[k]);
        bad += failed[k];
    }
    return bad != 0;
}

static void flush_to_zero(void)
{
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040u);
#elif defined(__aarch64__)
    uint64_t fpcr = UINT64_C(1) << 24;
    __asm__ volatile("msr fpcr, %0" : : "r"(fpcr) : "memory");
#endif
}

int main(int argc, char **argv)
{
    size_t size;
    uint8_t *data;
    int bad = 0, ran = 0, flush = argc == 4 && strcmp(argv[3], "flush") == 0;
    if (argc != 3 && !flush) {
        fprintf(stderr, "usage: kernel_vectors FILE LEVEL|all [flush]\n");
        return 2;
    }
    data = read_file(argv[1], &size);
    if (flush)
        flush_to_zero();
    for (size_t index = 0; pp1q_level(index) != NULL; index++) {
        if (strcmp(argv[2], "all") != 0 && strcmp(argv[2], pp1q_level(index)->name) != 0)
            continue;
        pp1q_level_select(pp1q_level(index)->name);
        bad |= run_level(data, size, flush);
        ran++;
    }
    free(data);
    if (!ran) {
        fprintf(stderr, "this CPU has no level %s\n", argv[2]);
        return 2;
    }
    return bad;
}

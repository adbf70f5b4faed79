/* Allocation of M over weights, and the top-k support (SPEC section 3): between a level's passes over the whole
 * vocabulary and the few candidates at the edge, which are decided exactly here.
 *
 * Nothing is sorted and nothing depends on the order of additions beyond the fixed tree, so counts are the same on
 * every architecture. Scratch memory is the caller's.
 */
#include <string.h>

#include "pp1q_kernels.h"

static inline uint64_t bits_of(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}

int pp1q_block_sums(const double *weights, size_t n, double *out)
{
    size_t whole = n / PP1Q_TREE * PP1Q_TREE;
    int bad = pp1q_ops->block_sums(weights, whole, out);
    if (whole < n) {
        double last[PP1Q_TREE] = {0};
        memcpy(last, weights + whole, (n - whole) * sizeof *weights);
        bad |= pp1q_ops->block_sums(last, PP1Q_TREE, out + whole / PP1Q_TREE);
    }
    return bad ? PP1Q_E_INVALID_WEIGHTS : PP1Q_OK;
}

double pp1q_tree_sum(double *sums, size_t n)
{
    if (n == 0)
        return 0.0;
    while (n > 1) {
        size_t half = n / 2;
        for (size_t i = 0; i < half; i++)
            sums[i] = sums[2 * i] + sums[2 * i + 1];
        if (n % 2 == 1)
            sums[half] = sums[n - 1];
        n = half + n % 2;
    }
    return sums[0];
}

/* The level of the largest node that starts at `first` and ends at or before `end`. A node (l, i) covers the blocks from i*2^l
 * up to (i+1)*2^l or the last: an odd one is carried up unchanged. */
static unsigned node_level(size_t first, size_t end, size_t blocks)
{
    unsigned level = 0;
    while (((size_t)1 << level) < blocks && first % ((size_t)2 << level) == 0) {
        size_t next = first + ((size_t)2 << level);
        if ((next < blocks ? next : blocks) > end)
            break;
        level++;
    }
    return level;
}

static size_t node_end(size_t first, unsigned level, size_t blocks)
{
    size_t end = first + ((size_t)1 << level);
    return end < blocks ? end : blocks;
}

size_t pp1q_tree_node_count(size_t first, size_t end, size_t blocks)
{
    size_t found = 0;
    for (; first < end; found++)
        first = node_end(first, node_level(first, end, blocks), blocks);
    return found;
}

size_t pp1q_tree_nodes(double *sums, size_t first, size_t end, size_t blocks, double *out)
{
    size_t found = 0, at = first;
    uint64_t saved = pp1q_fp_enter();
    while (at < end) {
        size_t next = node_end(at, node_level(at, end, blocks), blocks);
        out[found++] = pp1q_tree_sum(sums + (at - first), next - at);
        at = next;
    }
    pp1q_fp_leave(saved);
    return found;
}

double pp1q_tree_root(const uint32_t *edges, size_t shards, const double *nodes)
{
    struct { size_t first; unsigned level; double sum; } stack[PP1Q_NODES];
    size_t held = 0, blocks = edges[shards];
    uint64_t saved = pp1q_fp_enter();
    for (size_t s = 0; s < shards; s++)
        for (size_t at = edges[s]; at < edges[s + 1];) {
            stack[held].first = at;
            stack[held].level = node_level(at, edges[s + 1], blocks);
            stack[held++].sum = *nodes++;
            at = node_end(at, stack[held - 1].level, blocks);
            for (;;) { /* as long as the last one has its left sibling, or can have no right one */
                size_t top = held - 1, index = stack[top].first >> stack[top].level;
                if (((size_t)1 << stack[top].level) >= blocks)
                    break;
                if (index % 2 == 0) {
                    if (node_end(stack[top].first, stack[top].level, blocks) < blocks)
                        break;
                    stack[top].level++;
                } else {
                    if (top == 0 || stack[top - 1].level != stack[top].level)
                        break;
                    stack[top - 1].sum += stack[top].sum;
                    stack[top - 1].level++;
                    held--;
                }
            }
        }
    pp1q_fp_leave(saved);
    return held ? stack[0].sum : 0.0;
}

/* Of n keys, the want-th largest (1 <= want <= n), and in *ties how many keys equal to it belong to the want largest.
 * Radix selection, eight bits at a time: linear whatever the keys are. Destroys keys. */
static uint64_t select_largest(uint64_t *keys, size_t n, size_t want, size_t *ties)
{
    for (int shift = 56; shift >= 0 && n > 1; shift -= 8) {
        uint32_t histogram[256] = {0};
        unsigned digit = 255;
        size_t kept = 0;
        for (size_t i = 0; i < n; i++)
            histogram[(keys[i] >> shift) & 255]++;
        while (histogram[digit] < want)
            want -= histogram[digit--];
        if (histogram[digit] == n)
            continue;
        for (size_t i = 0; i < n; i++)
            if (((keys[i] >> shift) & 255) == digit)
                keys[kept++] = keys[i];
        n = kept;
    }
    *ties = want;
    return keys[0];
}

/* -- allocation ---------------------------------------------------------------------------------------------------- */

struct scratch {
    double *sums;
    uint64_t *keys, *work;
    uint32_t *ids;
    uint16_t *buckets;
};

static size_t padded(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static unsigned char *aligned(void *scratch)
{
    return (unsigned char *)(((uintptr_t)scratch + 63) / 64 * 64);
}

static size_t carve(struct scratch *parts, unsigned char *base, size_t n)
{
    size_t used = 0;
    parts->sums = (double *)(base + used);
    used += padded((n / PP1Q_TREE + 1) * sizeof(double));
    parts->keys = (uint64_t *)(base + used);
    used += padded(n * sizeof(uint64_t));
    parts->work = (uint64_t *)(base + used);
    used += padded(n * sizeof(uint64_t));
    parts->ids = (uint32_t *)(base + used);
    used += padded(n * sizeof(uint32_t));
    parts->buckets = (uint16_t *)(base + used);
    used += padded((n + PP1Q_TREE) * sizeof(uint16_t));
    return used;
}

size_t pp1q_allocate_scratch_bytes(size_t n)
{
    struct scratch parts;
    static unsigned char nowhere[1];
    return carve(&parts, nowhere, n) + 64;
}

static double remainder_of(double weight, double total)
{
    double scaled = weight * (double)PP1Q_MASS / total;
    return scaled - (double)(int32_t)scaled;
}

/* Floors into counts, buckets of remainders into parts->buckets (zero-filled to whole tree blocks). */
static uint64_t floor_pass(const double *weights, size_t n, double total, uint32_t *counts, struct scratch *parts)
{
    size_t whole = n / PP1Q_TREE * PP1Q_TREE, rest = n - whole;
    uint64_t sum = pp1q_ops->floors(weights, whole, total, counts, parts->buckets);
    if (rest > 0) {
        double last[PP1Q_TREE] = {0};
        uint32_t last_counts[PP1Q_TREE];
        memcpy(last, weights + whole, rest * sizeof *weights);
        sum += pp1q_ops->floors(last, PP1Q_TREE, total, last_counts, parts->buckets + whole);
        memcpy(counts + whole, last_counts, rest * sizeof *counts);
    }
    return sum;
}

/* The highest bucket at or above which at least `remaining` remainders lie; *above gets how many lie above it. A search
 * in quarters: its five vector passes over the buckets cost less than half of what a histogram does. */
static uint16_t find_edge(const uint16_t *buckets, size_t n, size_t remaining, size_t *above)
{
    uint16_t low = 0, high = PP1Q_BUCKETS;
    *above = 0;
    while (high - low > 1) {
        uint16_t step = (uint16_t)((high - low + 3) / 4), edges[3];
        size_t found[3];
        for (int e = 0; e < 3; e++)
            edges[e] = (uint16_t)(low + (e + 1) * step < high ? low + (e + 1) * step : high - 1);
        pp1q_ops->at_or_above(buckets, (n + PP1Q_TREE - 1) / PP1Q_TREE * PP1Q_TREE, edges, found);
        for (int e = 2; e >= 0; e--) {
            if (found[e] >= remaining) {
                low = edges[e];
                break;
            }
            high = edges[e];
            *above = found[e];
        }
    }
    return low;
}

/* Gives one ticket to each of the `remaining` largest remainders of positive weights, ties to the lowest ID. */
static int hand_out(const double *weights, size_t n, double total, uint32_t *counts, size_t remaining,
                    struct scratch *parts)
{
    size_t found, above, eligible = 0, ties;
    uint16_t edge = find_edge(parts->buckets, n, remaining, &above);
    uint64_t threshold;
    remaining -= above;
    found = pp1q_ops->tickets(counts, parts->buckets, n, edge, parts->ids);
    for (size_t i = 0; i < found; i++) {
        uint32_t id = parts->ids[i];
        if (bits_of(weights[id]) == 0)
            continue;
        parts->ids[eligible] = id;
        parts->keys[eligible] = bits_of(remainder_of(weights[id], total));
        parts->work[eligible] = parts->keys[eligible];
        eligible++;
    }
    if (remaining > eligible)
        return PP1Q_E_INVALID_WEIGHTS; /* more tickets than positive weights */
    threshold = select_largest(parts->work, eligible, remaining, &ties);
    for (size_t i = 0; i < eligible; i++) {
        if (parts->keys[i] > threshold)
            counts[parts->ids[i]]++;
        else if (parts->keys[i] == threshold && ties > 0) {
            counts[parts->ids[i]]++;
            ties--;
        }
    }
    return PP1Q_OK;
}

int pp1q_allocate_over(const double *weights, size_t n, double total, uint32_t *counts, void *scratch)
{
    struct scratch parts;
    uint64_t sum, mass = 0;
    (void)carve(&parts, aligned(scratch), n);
    sum = floor_pass(weights, n, total, counts, &parts);
    /* With the tree's own total the floors never pass M, and never fall short of it by more than there are positive
     * remainders, for any n below 2^29; that is checked and refused all the same, never clipped. */
    if (sum > PP1Q_MASS)
        return PP1Q_E_INVALID_WEIGHTS;
    if (sum < PP1Q_MASS) {
        int reason = hand_out(weights, n, total, counts, PP1Q_MASS - (size_t)sum, &parts);
        if (reason)
            return reason;
    }
    for (size_t i = 0; i < n; i += PP1Q_BLOCK) {
        if (pp1q_ops->count_sum(counts + i, n - i < PP1Q_BLOCK ? n - i : PP1Q_BLOCK, &sum) != 0)
            return PP1Q_E_MASS;
        mass += sum;
    }
    return mass == PP1Q_MASS ? PP1Q_OK : PP1Q_E_MASS;
}

static int is_infinite(double value)
{
    return bits_of(value) >= UINT64_C(0x7FF) << 52;
}

static int allocate(const double *weights, size_t n, uint32_t *counts, void *scratch)
{
    struct scratch parts;
    double total, largest = 0.0;
    int reason;
    (void)carve(&parts, aligned(scratch), n);
    reason = pp1q_block_sums(weights, n, parts.sums);
    if (reason)
        return reason;
    total = pp1q_tree_sum(parts.sums, (n + PP1Q_TREE - 1) / PP1Q_TREE);
    if (total == 0.0 || is_infinite(total))
        return PP1Q_E_INVALID_WEIGHTS;
    if (is_infinite(total * (double)PP1Q_MASS)) { /* then a w*M could overflow as well */
        for (size_t i = 0; i < n; i++)
            largest = weights[i] > largest ? weights[i] : largest;
        if (is_infinite(largest * (double)PP1Q_MASS))
            return PP1Q_E_INVALID_WEIGHTS;
    }
    return pp1q_allocate_over(weights, n, total, counts, scratch);
}

int pp1q_allocate(const double *weights, size_t n, uint32_t *counts, void *scratch)
{
    uint64_t saved = pp1q_fp_enter();
    int reason = allocate(weights, n, counts, scratch);
    pp1q_fp_leave(saved);
    return reason;
}

/* -- the top-k support --------------------------------------------------------------------------------------------- */

struct candidates {
    uint64_t *keys, *work;
    int32_t *ids;
    size_t held, capacity, k;
    double floor; /* only a larger weight can still enter: an equal one has a higher ID */
};

static size_t top_k_capacity(size_t n, size_t k)
{
    size_t wanted = 2 * k > k + 256 ? 2 * k : k + 256;
    return wanted < n + 1 ? wanted : n + 1;
}

size_t pp1q_top_k_scratch_bytes(size_t n, size_t k)
{
    return 3 * padded(top_k_capacity(n, k) * sizeof(uint64_t)) + 64;
}

/* Keeps the k best of the candidates held, in ascending order of ID as they came. */
static void keep_best(struct candidates *c)
{
    size_t ties, kept = 0;
    uint64_t threshold;
    if (c->held <= c->k)
        return;
    memcpy(c->work, c->keys, c->held * sizeof *c->keys);
    threshold = select_largest(c->work, c->held, c->k, &ties);
    for (size_t i = 0; i < c->held; i++) {
        int take = c->keys[i] > threshold;
        if (c->keys[i] == threshold && ties > 0) {
            take = 1;
            ties--;
        }
        if (take) {
            c->keys[kept] = c->keys[i];
            c->ids[kept++] = c->ids[i];
        }
    }
    c->held = kept;
    memcpy(&c->floor, &threshold, 8);
}

static void offer(struct candidates *c, const double *weights, size_t from, size_t end)
{
    for (size_t i = from; i < end; i++)
        if (weights[i] > c->floor) {
            c->keys[c->held] = bits_of(weights[i]);
            c->ids[c->held++] = (int32_t)i;
            if (c->held == c->capacity)
                keep_best(c);
        }
}

int64_t pp1q_top_k(const double *weights, size_t n, size_t k, int32_t *ids, void *scratch)
{
    unsigned char *base = aligned(scratch);
    size_t capacity = top_k_capacity(n, k), part = padded(capacity * sizeof(uint64_t));
    size_t whole = n / PP1Q_TREE * PP1Q_TREE;
    uint64_t saved = pp1q_fp_enter();
    struct candidates c = {.keys = (uint64_t *)base, .work = (uint64_t *)(base + part),
                           .ids = (int32_t *)(base + 2 * part), .capacity = capacity, .k = k};
    int bad = 0;
    for (size_t i = 0; i < whole && k > 0;) {
        i = pp1q_ops->find_above(weights, i, whole, c.floor, &bad);
        if (i < whole) {
            offer(&c, weights, i, i + PP1Q_TREE);
            i += PP1Q_TREE;
        }
    }
    for (size_t i = whole; i < n; i++)
        bad |= bits_of(weights[i]) >= UINT64_C(0x7FF) << 52;
    offer(&c, weights, whole, k > 0 ? n : whole);
    keep_best(&c);
    pp1q_fp_leave(saved);
    if (bad)
        return -(int64_t)PP1Q_E_INVALID_WEIGHTS;
    memcpy(ids, c.ids, c.held * sizeof *ids);
    return (int64_t)c.held;
}

/* A byte ring in memory that two processes share: one producer, one consumer, neither trusting the other.
 *
 * Between a daemon and its process (local/channel.py). Layout at the header: u64 head at 0 (bytes ever written, the producer's),
 * u64 tail at 64 (bytes ever read, the consumer's), u32 consumer_sleeping at 128, u32 producer_waiting at 192, data from 256 on.
 * Each end keeps its own index here, in private memory, and only ever stores it: what the peer scribbles over it harms the peer
 * alone. The other's index is judged each time it is loaded; an impossible one breaks the ring for good. Knows no records, makes no
 * system call, never blocks. Indexes are modulo 2^64, capacity is a power of two.
 */
#ifndef PP1Q_RING_H
#define PP1Q_RING_H

#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

enum {
    PP1Q_RING_HEAD = 0,
    PP1Q_RING_TAIL = 64,
    PP1Q_RING_SLEEPING = 128,
    PP1Q_RING_WAITING = 192,
    PP1Q_RING_HEADER_BYTES = 256,
    PP1Q_RING_BROKEN = -1,
};

struct pp1q_ring {
    uint8_t *shared;   /* the header; data follow */
    uint64_t capacity;
    uint64_t own;      /* this end's index: head of a producer, tail of a consumer */
    uint64_t seen;     /* the other's, as last loaded and found possible */
    int broken;
};

static inline _Atomic uint64_t *pp1q_ring_index(const struct pp1q_ring *ring, size_t at)
{
    return (_Atomic uint64_t *)(void *)(ring->shared + at);
}

static inline _Atomic uint32_t *pp1q_ring_flag(const struct pp1q_ring *ring, size_t at)
{
    return (_Atomic uint32_t *)(void *)(ring->shared + at);
}

static inline void pp1q_ring_init(struct pp1q_ring *ring, uint8_t *shared, uint64_t capacity, uint64_t start)
{
    ring->shared = shared;
    ring->capacity = capacity;
    ring->own = ring->seen = start;
    ring->broken = 0;
}

/* Bytes of room by a fresh look at the tail, which can only lie between where it was and the head; -1 broken. */
static inline int64_t pp1q_ring_writable(struct pp1q_ring *ring)
{
    uint64_t tail = atomic_load_explicit(pp1q_ring_index(ring, PP1Q_RING_TAIL), memory_order_acquire);

    if (ring->broken || tail - ring->seen > ring->own - ring->seen) {
        ring->broken = 1;
        return PP1Q_RING_BROKEN;
    }
    ring->seen = tail;
    return (int64_t)(ring->capacity - (ring->own - tail));
}

/* Bytes to read by a fresh look at the head, which can only lie between where it was and a full ring; -1 broken. */
static inline int64_t pp1q_ring_readable(struct pp1q_ring *ring)
{
    uint64_t head = atomic_load_explicit(pp1q_ring_index(ring, PP1Q_RING_HEAD), memory_order_acquire);

    if (ring->broken || head - ring->seen > ring->own + ring->capacity - ring->seen) {
        ring->broken = 1;
        return PP1Q_RING_BROKEN;
    }
    ring->seen = head;
    return (int64_t)(head - ring->own);
}

/* Room for `wanted` bytes, or all there is; looks at shared memory only when what was seen last does not do. */
static inline int64_t pp1q_ring_room(struct pp1q_ring *ring, uint64_t wanted)
{
    uint64_t room = ring->capacity - (ring->own - ring->seen);

    return !ring->broken && room >= wanted ? (int64_t)room : pp1q_ring_writable(ring);
}

static inline int64_t pp1q_ring_ready(struct pp1q_ring *ring, uint64_t wanted)
{
    uint64_t ready = ring->seen - ring->own;

    return !ring->broken && ready >= wanted ? (int64_t)ready : pp1q_ring_readable(ring);
}

static inline void pp1q_ring_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory"); /* about as long as x86's pause; yield does nothing on most cores */
#endif
}

/* As pp1q_ring_readable, but looks up to `looks` times while there is nothing. */
static inline int64_t pp1q_ring_poll(struct pp1q_ring *ring, uint64_t looks)
{
    int64_t ready = pp1q_ring_readable(ring);

    while (ready == 0 && looks-- > 1) {
        pp1q_ring_relax();
        ready = pp1q_ring_readable(ring);
    }
    return ready;
}

/* Copies into the ring at `index` without publishing it; the caller knows that there is room. */
static inline void pp1q_ring_put(struct pp1q_ring *ring, uint64_t index, const uint8_t *from, uint64_t length)
{
    uint8_t *data = ring->shared + PP1Q_RING_HEADER_BYTES;
    uint64_t at = index & (ring->capacity - 1);
    uint64_t first = length < ring->capacity - at ? length : ring->capacity - at;

    if (first > 0)
        memcpy(data + at, from, first);
    if (length > first)
        memcpy(data, from + first, length - first);
}

static inline void pp1q_ring_publish(struct pp1q_ring *ring, uint64_t length)
{
    ring->own += length;
    atomic_store_explicit(pp1q_ring_index(ring, PP1Q_RING_HEAD), ring->own, memory_order_release);
}

/* What fits: 0 when full, -1 broken. */
static inline int64_t pp1q_ring_write(struct pp1q_ring *ring, const uint8_t *from, uint64_t length)
{
    int64_t room = pp1q_ring_room(ring, length);

    if (room <= 0)
        return room;
    if (length > (uint64_t)room)
        length = (uint64_t)room;
    pp1q_ring_put(ring, ring->own, from, length);
    pp1q_ring_publish(ring, length);
    return (int64_t)length;
}

/* Two pieces as one, published together: their length, 0 when they don't fit now, -1 broken. */
static inline int64_t pp1q_ring_write_two(struct pp1q_ring *ring, const uint8_t *a, uint64_t a_length, const uint8_t *b,
                                          uint64_t b_length)
{
    int64_t room = pp1q_ring_room(ring, a_length + b_length);

    if (room < 0 || a_length + b_length > (uint64_t)room)
        return room < 0 ? room : 0;
    pp1q_ring_put(ring, ring->own, a, a_length);
    pp1q_ring_put(ring, ring->own + a_length, b, b_length);
    pp1q_ring_publish(ring, a_length + b_length);
    return (int64_t)(a_length + b_length);
}

/* Up to `length` bytes out of the ring: 0 when empty, -1 broken. */
static inline int64_t pp1q_ring_read(struct pp1q_ring *ring, uint8_t *to, uint64_t length)
{
    const uint8_t *data = ring->shared + PP1Q_RING_HEADER_BYTES;
    int64_t ready = pp1q_ring_ready(ring, length);
    uint64_t at = ring->own & (ring->capacity - 1), first;

    if (ready <= 0)
        return ready;
    if (length > (uint64_t)ready)
        length = (uint64_t)ready;
    first = length < ring->capacity - at ? length : ring->capacity - at;
    if (first > 0)
        memcpy(to, data + at, first);
    if (length > first)
        memcpy(to + first, data, length - first);
    ring->own += length;
    atomic_store_explicit(pp1q_ring_index(ring, PP1Q_RING_TAIL), ring->own, memory_order_release);
    return (int64_t)length;
}

/* Sleeping without a lost wake-up: the sleeper sets its flag, fences, looks once more; the other end publishes, fences, looks at
 * the flag. One of the two sees the other's store. */

static inline void pp1q_ring_lower(struct pp1q_ring *ring, size_t flag)
{
    atomic_store_explicit(pp1q_ring_flag(ring, flag), 0, memory_order_relaxed);
}

static inline void pp1q_ring_raise(struct pp1q_ring *ring, size_t flag)
{
    atomic_store_explicit(pp1q_ring_flag(ring, flag), 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst);
}

/* 1 when the other end had raised its flag, which is lowered: ring its doorbell. */
static inline int pp1q_ring_take_flag(struct pp1q_ring *ring, size_t flag)
{
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(pp1q_ring_flag(ring, flag), memory_order_relaxed) == 0)
        return 0;
    return atomic_exchange_explicit(pp1q_ring_flag(ring, flag), 0, memory_order_relaxed) != 0;
}

#endif

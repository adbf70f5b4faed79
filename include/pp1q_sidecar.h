/* The sidecar's memory and records for processes that are not Python: attach to a daemon, send and receive records, read slots.
 *
 * Between a draft or target process and its daemon; the same contract as pp1q_transport/local (handshake.py, channel.py,
 * messages.py). Header only (four of them), C11, Linux 5.8 or newer. Include it first, or define _GNU_SOURCE.
 * Nothing here blocks but pp1q_attach and pp1q_wait. One attachment belongs to one thread. Functions return -errno on failure;
 * what a daemon passes is checked before it is touched, so that a wrong one is an error and not a crash.
 * A record's `reason` and an answer's `verdict` are codes: docs/reasons.md, column "code", says which reason each one is.
 */
#ifndef PP1Q_SIDECAR_H
#define PP1Q_SIDECAR_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "pp1q_bell.h"
#include "pp1q_records.h"
#include "pp1q_ring.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "records and slots are little-endian; this header does not swap bytes"
#endif

/* -- the handshake ----------------------------------------------------------------------------------------------------------- */

enum pp1q_role { PP1Q_LEADER_DRAFT = 1, PP1Q_RECEIVER_TARGET = 2, PP1Q_ADMIN = 3 };
enum pp1q_flag { PP1Q_DENSE = 1, PP1Q_SPARSE = 2, PP1Q_DRAW_PROOF = 4 };
enum { PP1Q_ATTACH_VERSION = 1, PP1Q_MAX_REGIONS = 16, PP1Q_FIRST_REGION = 3 };

struct pp1q_attach_request {
    char magic[4]; /* "PP1A" */
    uint16_t version, role;
    uint32_t rank, zero;
};

/* Then `text_length` bytes of UTF-8. Descriptors: channel, the bell to sleep on, the bell to ring, one for each region. */
struct pp1q_answer {
    char magic[4];
    uint16_t version, verdict; /* 0, or the code of a reason: docs/reasons.md, column "code" */
    uint32_t text_length, regions;
    uint32_t vocab_size, depth, support, max_slots, row_bytes, dense_row_bytes, group_size, rank, group_mode, flags;
    uint32_t max_context_tokens, ring_capacity, targets, zero;
    uint64_t boot_nonce;
    uint64_t size[PP1Q_MAX_REGIONS];
};

/* A process's share of its daemon. Read `answer` and `regions`; leave the rest to the functions below. */
struct pp1q_attachment {
    int sock, my_bell, daemon_bell;
    struct pp1q_answer answer;
    char text[PP1Q_MAX_TEXT_BYTES + 1]; /* the daemon's words when it refuses */
    uint8_t *regions[PP1Q_MAX_REGIONS]; /* read-only for a target: a store there is a SIGSEGV */
    uint8_t *channel;
    size_t channel_bytes;
    struct pp1q_ring incoming, outgoing;
    uint8_t *body; /* the record received last, out of the daemon's reach */
    int sent, took, broken;
};

/* Where a row's q lies in a region: dense is float [vocab_size], sparse is float q[entries] and then int32_t ids[entries]. */
static inline size_t pp1q_row_offset(const struct pp1q_answer *geometry, uint32_t slot, uint32_t row)
{
    return ((size_t)slot * geometry->depth + row) * geometry->row_bytes;
}

/* Where a slot's int32_t tokens[depth] lie, which its uint32_t entries[depth] follow. */
static inline size_t pp1q_meta_offset(const struct pp1q_answer *geometry, uint32_t slot)
{
    size_t meta_bytes = ((size_t)geometry->depth * 8 + 63) / 64 * 64;

    return pp1q_row_offset(geometry, geometry->max_slots, 0) + slot * meta_bytes;
}

static inline size_t pp1q_slots_bytes(const struct pp1q_answer *geometry)
{
    return pp1q_meta_offset(geometry, geometry->max_slots);
}

static inline size_t pp1q_channel_bytes(uint32_t capacity)
{
    return 2 * ((size_t)PP1Q_RING_HEADER_BYTES + capacity);
}

/* Leaves the daemon and frees everything; harmless on an attachment that failed. */
static inline void pp1q_detach(struct pp1q_attachment *a)
{
    const int fds[] = {a->sock, a->my_bell, a->daemon_bell};
    uint32_t region;
    size_t each;

    for (region = 0; region < PP1Q_MAX_REGIONS; region++)
        if (a->regions[region] != NULL)
            munmap(a->regions[region], a->answer.size[region]);
    if (a->channel != NULL)
        munmap(a->channel, a->channel_bytes);
    for (each = 0; each < sizeof fds / sizeof fds[0]; each++)
        if (fds[each] >= 0)
            close(fds[each]);
    free(a->body);
    memset(a, 0, sizeof *a);
    a->sock = a->my_bell = a->daemon_bell = -1;
    a->broken = 1;
}

/* Maps memory that can't shrink under us; NULL when it could, or is not of `size` bytes. */
static inline uint8_t *pp1q_map_sealed(int fd, size_t size, int prot)
{
    const int wanted = F_SEAL_SHRINK | F_SEAL_GROW;
    int seals = fcntl(fd, F_GET_SEALS);
    struct stat facts;
    void *map;

    if (size == 0 || seals < 0 || (seals & wanted) != wanted || fstat(fd, &facts) < 0 || (uint64_t)facts.st_size != size)
        return NULL;
    map = mmap(NULL, size, prot, MAP_SHARED | MAP_POPULATE, fd, 0);
    return map == MAP_FAILED ? NULL : (uint8_t *)map;
}

static inline int pp1q_answer_ok(const struct pp1q_answer *answer, size_t bytes)
{
    uint32_t capacity = answer->ring_capacity, region;

    if (bytes < sizeof *answer || memcmp(answer->magic, "PP1A", 4) != 0 || answer->version != PP1Q_ATTACH_VERSION)
        return 0;
    if (answer->text_length != bytes - sizeof *answer || answer->regions > PP1Q_MAX_REGIONS || answer->zero != 0)
        return 0;
    if (answer->verdict != 0)
        return 1;
    if (capacity < 4096 || capacity > 1u << 26 || (capacity & (capacity - 1)) != 0)
        return 0;
    if (answer->depth == 0 || answer->max_slots == 0 || answer->row_bytes == 0 || answer->row_bytes % 64 != 0)
        return 0;
    if ((uint64_t)answer->max_slots * answer->depth > (1ull << 42) / (answer->row_bytes + 8ull))
        return 0;
    for (region = 0; region < answer->regions; region++)
        if (answer->size[region] < pp1q_slots_bytes(answer))
            return 0;
    return 1;
}

/* One ANSWER with up to `room` descriptors, whose number comes back; -errno. */
static inline int pp1q_receive_answer(struct pp1q_attachment *a, int *fds, int room)
{
    union {
        struct cmsghdr aligned;
        char bytes[CMSG_SPACE((PP1Q_FIRST_REGION + PP1Q_MAX_REGIONS) * sizeof(int))];
    } control;
    struct iovec into[2] = {{&a->answer, sizeof a->answer}, {a->text, PP1Q_MAX_TEXT_BYTES}};
    struct msghdr message;
    struct cmsghdr *part;
    ssize_t got = -1;
    int count = 0, attempt;

    for (attempt = 0; got < 0 && attempt < 8; attempt++) {
        memset(&message, 0, sizeof message);
        message.msg_iov = into;
        message.msg_iovlen = 2;
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        got = recvmsg(a->sock, &message, MSG_CMSG_CLOEXEC);
        /* A daemon that refused without reading our request: the reset comes before its answer. */
        if (got < 0 && errno != EINTR && errno != ECONNRESET)
            return errno == EAGAIN ? -ETIMEDOUT : -errno;
    }
    if (got <= 0)
        return -ECONNRESET;
    for (part = CMSG_FIRSTHDR(&message); part != NULL; part = CMSG_NXTHDR(&message, part)) {
        size_t here = part->cmsg_len > CMSG_LEN(0) ? (part->cmsg_len - CMSG_LEN(0)) / sizeof(int) : 0, each;

        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
            continue;
        for (each = 0; each < here; each++) {
            int fd;

            memcpy(&fd, CMSG_DATA(part) + each * sizeof fd, sizeof fd);
            if (count < room)
                fds[count++] = fd;
            else
                close(fd);
        }
    }
    if ((message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0 || !pp1q_answer_ok(&a->answer, (size_t)got)) {
        while (count > 0)
            close(fds[--count]);
        return -EPROTO;
    }
    return count;
}

static inline int pp1q_take_over(struct pp1q_attachment *a, int *fds, int count, int writable)
{
    uint32_t capacity = a->answer.ring_capacity, region;
    const int read_write = PROT_READ | PROT_WRITE;

    if (a->answer.verdict != 0 || count != PP1Q_FIRST_REGION + (int)a->answer.regions)
        return -EPROTO;
    a->channel_bytes = pp1q_channel_bytes(capacity);
    a->channel = pp1q_map_sealed(fds[0], a->channel_bytes, read_write);
    if (a->channel == NULL)
        return -EPROTO;
    for (region = 0; region < a->answer.regions; region++) {
        a->regions[region] =
            pp1q_map_sealed(fds[PP1Q_FIRST_REGION + region], a->answer.size[region], writable ? read_write : PROT_READ);
        if (a->regions[region] == NULL)
            return -EPROTO;
    }
    pp1q_ring_init(&a->outgoing, a->channel, capacity, 0);
    pp1q_ring_init(&a->incoming, a->channel + PP1Q_RING_HEADER_BYTES + capacity, capacity, 0);
    a->body = (uint8_t *)malloc(capacity);
    if (a->body == NULL)
        return -ENOMEM;
    a->my_bell = fds[1];
    a->daemon_bell = fds[2];
    fds[1] = fds[2] = -1;
    return 0;
}

/* Joins the daemon at `path`: 0, -errno, or the (positive) code of the reason for which it refuses, with its words in `text`. */
static inline int pp1q_attach(struct pp1q_attachment *a, const char *path, enum pp1q_role role, uint32_t rank, int timeout_ms)
{
    struct pp1q_attach_request request = {{'P', 'P', '1', 'A'}, PP1Q_ATTACH_VERSION, (uint16_t)role, rank, 0};
    struct sockaddr_un address;
    struct timeval patience = {timeout_ms / 1000, timeout_ms % 1000 * 1000};
    int fds[PP1Q_FIRST_REGION + PP1Q_MAX_REGIONS], count, outcome;

    memset(a, 0, sizeof *a);
    a->my_bell = a->daemon_bell = -1;
    a->sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (a->sock < 0)
        return -errno;
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    outcome = strlen(path) < sizeof address.sun_path ? 0 : -ENAMETOOLONG;
    if (outcome == 0) {
        memcpy(address.sun_path, path, strlen(path));
        setsockopt(a->sock, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
        setsockopt(a->sock, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
        if (connect(a->sock, (const struct sockaddr *)&address, sizeof address) < 0)
            outcome = errno == EAGAIN ? -ETIMEDOUT : -errno;
    }
    /* EPIPE: refused before it was heard, and the answer lies there already. */
    if (outcome == 0 && send(a->sock, &request, sizeof request, MSG_NOSIGNAL) < 0 && errno != EPIPE)
        outcome = -errno;
    if (outcome == 0) {
        count = pp1q_receive_answer(a, fds, (int)(sizeof fds / sizeof fds[0]));
        outcome = count < 0 ? count : a->answer.verdict;
        if (outcome == 0)
            outcome = pp1q_take_over(a, fds, count, role == PP1Q_LEADER_DRAFT);
        while (count > 0)
            if (fds[--count] >= 0)
                close(fds[count]);
    }
    if (outcome != 0) {
        char words[sizeof a->text];

        memcpy(words, a->text, sizeof words);
        pp1q_detach(a);
        memcpy(a->text, words, sizeof words);
    }
    return outcome;
}

/* -- records through the channel --------------------------------------------------------------------------------------------- */

/* Appends one record and rings no bell (pp1q_flush does, once for several): 0, -EAGAIN when there is no room now, -EMSGSIZE when it
 * can never fit, -EPROTO when the channel is broken for good. */
static inline int pp1q_send(struct pp1q_attachment *a, enum pp1q_kind kind, const void *fixed, size_t fixed_bytes,
                            const void *payload, size_t payload_bytes)
{
    struct pp1q_record head = {0, (uint16_t)kind, 0};
    uint64_t capacity = a->outgoing.capacity, total = sizeof head + fixed_bytes + payload_bytes;
    int64_t room;

    if (a->broken)
        return -EPROTO;
    if (fixed_bytes > capacity || payload_bytes > capacity || total > capacity)
        return -EMSGSIZE;
    room = pp1q_ring_room(&a->outgoing, total);
    if (room < 0) {
        a->broken = 1;
        return -EPROTO;
    }
    if ((uint64_t)room < total)
        return -EAGAIN;
    head.length = (uint32_t)total;
    pp1q_ring_put(&a->outgoing, a->outgoing.own, (const uint8_t *)&head, sizeof head);
    pp1q_ring_put(&a->outgoing, a->outgoing.own + sizeof head, (const uint8_t *)fixed, fixed_bytes);
    pp1q_ring_put(&a->outgoing, a->outgoing.own + sizeof head + fixed_bytes, (const uint8_t *)payload, payload_bytes);
    pp1q_ring_publish(&a->outgoing, total);
    a->sent = 1;
    return 0;
}

/* Wakes the daemon if it sleeps and was sent something, or waits for room and was relieved of something. */
static inline void pp1q_flush(struct pp1q_attachment *a)
{
    int wake = 0;

    if (a->sent)
        wake = pp1q_ring_take_flag(&a->outgoing, PP1Q_RING_SLEEPING);
    if (a->took)
        wake |= pp1q_ring_take_flag(&a->incoming, PP1Q_RING_WAITING);
    a->sent = a->took = 0;
    if (wake)
        pp1q_bell_ring(a->daemon_bell);
}

/* The next record: its body's length (0 or more) with `kind` and `body`, good until the next call; -EAGAIN when there is none;
 * -EPROTO when the daemon wrote nonsense, for good. Check that the length is at least the struct's before you look into it. */
static inline int64_t pp1q_receive(struct pp1q_attachment *a, uint16_t *kind, const uint8_t **body)
{
    struct pp1q_record head = {0, 0, 0};
    int64_t got = a->broken ? -1 : pp1q_ring_read(&a->incoming, (uint8_t *)&head, sizeof head);
    uint64_t length;

    if (got == 0)
        return -EAGAIN;
    length = (uint64_t)head.length - sizeof head;
    if (got != (int64_t)sizeof head || head.length < sizeof head || head.length > a->incoming.capacity || head.zero != 0 ||
        (length > 0 && pp1q_ring_read(&a->incoming, a->body, length) != (int64_t)length)) {
        a->broken = 1;
        return -EPROTO;
    }
    a->took = 1;
    *kind = head.kind;
    *body = a->body;
    return (int64_t)length;
}

/* Sleeps until a record may be there, at most `timeout_ms`: 0, -EPIPE when the daemon ended, -errno. Look after each return. */
static inline int pp1q_wait(struct pp1q_attachment *a, int timeout_ms)
{
    struct pollfd polled[2] = {{a->my_bell, POLLIN, 0}, {a->sock, POLLIN, 0}};
    int ready = 0, failed = 0;

    if (a->broken)
        return -EPROTO;
    pp1q_flush(a);
    pp1q_ring_raise(&a->incoming, PP1Q_RING_SLEEPING);
    if (pp1q_ring_readable(&a->incoming) == 0) {
        ready = poll(polled, 2, timeout_ms);
        failed = ready < 0 && errno != EINTR ? -errno : 0;
    }
    pp1q_ring_lower(&a->incoming, PP1Q_RING_SLEEPING);
    if (ready > 0 && polled[0].revents != 0)
        pp1q_bell_drain(a->my_bell);
    /* Nothing is said over the socket after the handshake: whatever it tells of is the end. */
    if (ready > 0 && polled[1].revents != 0 && pp1q_ring_readable(&a->incoming) <= 0)
        return -EPIPE;
    return failed;
}

#endif

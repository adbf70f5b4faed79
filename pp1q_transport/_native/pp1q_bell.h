/* Doorbells: the one system call that wakes a process, and the one with which it takes note. Neither ever blocks.
 *
 * Between the channel and the kernel. An eventfd or a pipe. The file behind a descriptor that was passed to a peer is shared with its
 * flags, so a hostile peer could clear O_NONBLOCK: reads carry their own RWF_NOWAIT (eventfd: Linux 5.8), and whoever must not
 * be blocked by a write writes to a pipe of which the peer has the other end only. Answers are 0 or more, or -errno.
 */
#ifndef PP1Q_BELL_H
#define PP1Q_BELL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* preadv2 */
#endif
#include <errno.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static inline int pp1q_bell_ring(int fd)
{
    const uint64_t one = 1; /* what an eventfd adds; a pipe takes it for eight bytes */
    ssize_t wrote;

    do {
        wrote = write(fd, &one, sizeof one);
    } while (wrote < 0 && errno == EINTR);
    return wrote < 0 ? -errno : 0;
}

static inline int pp1q_bell_drain(int fd)
{
    uint8_t bytes[4096];
    struct iovec into = {.iov_base = bytes, .iov_len = sizeof bytes};
    ssize_t took;

    do {
        took = preadv2(fd, &into, 1, -1, RWF_NOWAIT);
    } while (took < 0 && errno == EINTR);
    return took < 0 ? -errno : (int)took;
}

#endif

/* Non-blocking socket calls that answer with -errno: between the compiled hot modules and the kernel.
 *
 * Nothing here knows a frame, checks a bound or keeps state; net.pyx checks bounds and decides about the GIL.
 * Conventions: bytes moved (> 0), 0 for end of stream, -errno otherwise; EINTR is retried, never reported, except by
 * pp1q_ppoll2, whose caller must get the chance to run signal handlers. Linux only. SPEC section 2 (data plane, tcp).
 */
#ifndef PP1Q_NET_H
#define PP1Q_NET_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* ppoll */
#endif
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>

static inline ssize_t pp1q_recv(int fd, uint8_t *data, size_t length)
{
    ssize_t moved;

    do {
        moved = recv(fd, data, length, MSG_DONTWAIT);
    } while (moved < 0 && errno == EINTR);
    return moved < 0 ? -(ssize_t)errno : moved;
}

static inline ssize_t pp1q_send(int fd, const uint8_t *data, size_t length, int more)
{
    int flags = MSG_DONTWAIT | MSG_NOSIGNAL | (more ? MSG_MORE : 0);
    ssize_t moved;

    do {
        moved = send(fd, data, length, flags);
    } while (moved < 0 && errno == EINTR);
    return moved < 0 ? -(ssize_t)errno : moved;
}

static inline ssize_t pp1q_send2(int fd, const uint8_t *a, size_t length_a, const uint8_t *b, size_t length_b)
{
    struct iovec pieces[2] = {
        {.iov_base = (void *)a, .iov_len = length_a},
        {.iov_base = (void *)b, .iov_len = length_b},
    };
    struct msghdr message;
    ssize_t moved;

    memset(&message, 0, sizeof message);
    message.msg_iov = pieces;
    message.msg_iovlen = 2;
    do {
        moved = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (moved < 0 && errno == EINTR);
    return moved < 0 ? -(ssize_t)errno : moved;
}

/* Sends an acknowledgement that the kernel is holding back, if there is one, and then lets it hold back later ones (tcp(7),
 * TCP_QUICKACK). The second call is needed: without a held acknowledgement the first one leaves the socket in quick mode, and
 * then every receive pays for one. */
static inline int pp1q_quick_ack(int fd)
{
    int on = 1, off = 0;

    if (setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &on, sizeof on) < 0)
        return -errno;
    return setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &off, sizeof off) < 0 ? -errno : 0;
}

/* Ready bits (1: fd_a, 2: fd_b), 0 at the timeout, -errno. A negative fd is not waited for; a closed one is -EBADF. */
static inline int pp1q_ppoll2(int fd_a, short events_a, int fd_b, short events_b, int64_t timeout_ns)
{
    struct pollfd polled[2] = {
        {.fd = fd_a, .events = events_a},
        {.fd = fd_b, .events = events_b},
    };
    struct timespec timeout;
    int ready;

    if (timeout_ns < 0)
        timeout_ns = 0;
    timeout.tv_sec = (time_t)(timeout_ns / 1000000000);
    timeout.tv_nsec = (long)(timeout_ns % 1000000000);
    ready = ppoll(polled, 2, &timeout, NULL);
    if (ready < 0)
        return -errno;
    if ((polled[0].revents | polled[1].revents) & POLLNVAL)
        return -EBADF;
    return (polled[0].revents != 0) | (polled[1].revents != 0) << 1;
}

#endif

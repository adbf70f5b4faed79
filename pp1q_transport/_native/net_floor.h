/* The socket and memcpy floors of the link benchmark: what this machine does when nothing is framed, checked or counted.
 *
 * Between net.pyx (bounds, GIL, exceptions) and the kernel. Both ends run one of two pairs: ask/answer (a request, n bytes
 * back) or receive/send (n bytes at a time, at most `window` of them not yet acknowledged). SPEC section 9 (floors).
 */
#ifndef PP1Q_NET_FLOOR_H
#define PP1Q_NET_FLOOR_H

#include <stddef.h>
#include <stdint.h>

/* One end. With `spin` every call is non-blocking and repeated at once; without, the descriptor must be a blocking one
 * with a receive and send timeout, so that a blocked call comes back to look at the clock. */
struct net_floor {
    int fd;
    int spin;
    int64_t timeout_ns;       /* longest wait without a byte moved */
    int (*interrupted)(void); /* non-zero: stop with -EINTR; called now and then while waiting */
};

/* `slots` areas of `bytes` each, taken in turn, as the transport takes its slots. */
struct net_floor_area {
    uint8_t *memory;
    size_t bytes;
    size_t slots;
};

/* 0 or nanoseconds on success; -ECONNRESET when the peer closed, -ETIMEDOUT, -EINTR, or what the socket said. */
int64_t net_floor_read(const struct net_floor *end, uint8_t *data, size_t length);
int64_t net_floor_write(const struct net_floor *end, const uint8_t *data, size_t length);
int64_t net_floor_ask(const struct net_floor *end, struct net_floor_area area, uint8_t *request, size_t request_bytes,
                      uint64_t *samples_ns, size_t count);
int64_t net_floor_answer(const struct net_floor *end, struct net_floor_area area, uint8_t *request,
                         size_t request_bytes, size_t count);
int64_t net_floor_receive(const struct net_floor *end, struct net_floor_area area, size_t count);
int64_t net_floor_send(const struct net_floor *end, struct net_floor_area area, size_t window, size_t count);
int64_t net_floor_memcpy(struct net_floor_area to, struct net_floor_area from, size_t count);

#endif

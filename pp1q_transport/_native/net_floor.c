/* The loops behind the socket and memcpy floors; net_floor.h says what they are for. */
#define _GNU_SOURCE
#include "net_floor.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <time.h>

enum {
    ACK_BYTES = 8,
    POLLS_PER_CLOCK = 256,        /* an empty poll costs some 300 ns: looks at the clock about every 80 us */
    SIGNAL_CHECK_NS = 50 * 1000 * 1000,
};

/* How long one read or write has waited without moving a byte. */
struct patience {
    int64_t began_ns;
    int64_t checked_ns;
    unsigned polls;
};

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* After a call that moved nothing: 0 to try again, or why not. */
static int wait_more(const struct net_floor *end, struct patience *patience)
{
    int64_t now;

    if (end->spin && ++patience->polls % POLLS_PER_CLOCK != 0)
        return 0;
    now = now_ns();
    if (patience->began_ns == 0)
        patience->began_ns = patience->checked_ns = now;
    if (now - patience->began_ns > end->timeout_ns)
        return -ETIMEDOUT;
    if (!end->spin || now - patience->checked_ns > SIGNAL_CHECK_NS) {
        patience->checked_ns = now;
        if (end->interrupted() != 0)
            return -EINTR;
    }
    return 0;
}

int64_t net_floor_read(const struct net_floor *end, uint8_t *data, size_t length)
{
    const int flags = end->spin ? MSG_DONTWAIT : 0;
    struct patience patience = {0};
    size_t done = 0;

    while (done < length) {
        ssize_t moved = recv(end->fd, data + done, length - done, flags);

        if (moved > 0) {
            done += (size_t)moved;
            patience.began_ns = 0;
        } else if (moved == 0) {
            return -ECONNRESET;
        } else if (errno == EAGAIN || errno == EINTR) {
            int stop = wait_more(end, &patience);

            if (stop != 0)
                return stop;
        } else {
            return -(int64_t)errno;
        }
    }
    return 0;
}

int64_t net_floor_write(const struct net_floor *end, const uint8_t *data, size_t length)
{
    const int flags = MSG_NOSIGNAL | (end->spin ? MSG_DONTWAIT : 0);
    struct patience patience = {0};
    size_t done = 0;

    while (done < length) {
        ssize_t moved = send(end->fd, data + done, length - done, flags);

        if (moved > 0) {
            done += (size_t)moved;
            patience.began_ns = 0;
        } else if (errno == EAGAIN || errno == EINTR) {
            int stop = wait_more(end, &patience);

            if (stop != 0)
                return stop;
        } else {
            return -(int64_t)errno;
        }
    }
    return 0;
}

static uint8_t *slot(struct net_floor_area area, size_t turn)
{
    return area.memory + (turn % area.slots) * area.bytes;
}

int64_t net_floor_ask(const struct net_floor *end, struct net_floor_area area, uint8_t *request, size_t request_bytes,
                      uint64_t *samples_ns, size_t count)
{
    for (size_t turn = 0; turn < count; turn++) {
        int64_t begin = now_ns();
        int64_t failed = net_floor_write(end, request, request_bytes);

        if (failed == 0)
            failed = net_floor_read(end, slot(area, turn), area.bytes);
        if (failed != 0)
            return failed;
        samples_ns[turn] = (uint64_t)(now_ns() - begin);
    }
    return 0;
}

int64_t net_floor_answer(const struct net_floor *end, struct net_floor_area area, uint8_t *request,
                         size_t request_bytes, size_t count)
{
    for (size_t turn = 0; turn < count; turn++) {
        int64_t failed = net_floor_read(end, request, request_bytes);

        if (failed == 0)
            failed = net_floor_write(end, slot(area, turn), area.bytes);
        if (failed != 0)
            return failed;
    }
    return 0;
}

/* The receiving end starts the clock with its go-ahead and stops it with the last byte landed, as a STEP and its rows do. */
int64_t net_floor_receive(const struct net_floor *end, struct net_floor_area area, size_t count)
{
    const uint8_t ack[ACK_BYTES] = {1};
    int64_t begin = now_ns(), finish = begin;
    int64_t failed = net_floor_write(end, ack, sizeof ack);

    for (size_t turn = 0; turn < count && failed == 0; turn++) {
        failed = net_floor_read(end, slot(area, turn), area.bytes);
        if (failed == 0) {
            finish = now_ns();
            failed = net_floor_write(end, ack, sizeof ack);
        }
    }
    return failed != 0 ? failed : finish - begin;
}

int64_t net_floor_send(const struct net_floor *end, struct net_floor_area area, size_t window, size_t count)
{
    uint8_t ack[ACK_BYTES];
    size_t acknowledged = 0;
    int64_t failed = net_floor_read(end, ack, sizeof ack);
    int64_t begin = now_ns();

    for (size_t turn = 0; turn < count && failed == 0; turn++) {
        if (turn - acknowledged == window) {
            failed = net_floor_read(end, ack, sizeof ack);
            acknowledged++;
        }
        if (failed == 0)
            failed = net_floor_write(end, slot(area, turn), area.bytes);
    }
    for (; acknowledged < count && failed == 0; acknowledged++)
        failed = net_floor_read(end, ack, sizeof ack);
    return failed != 0 ? failed : now_ns() - begin;
}

int64_t net_floor_memcpy(struct net_floor_area to, struct net_floor_area from, size_t count)
{
    int64_t begin = now_ns();

    for (size_t turn = 0; turn < count; turn++)
        memcpy(slot(to, turn), slot(from, turn), to.bytes);
    return now_ns() - begin;
}

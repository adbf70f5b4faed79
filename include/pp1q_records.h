/* The records that pass between a daemon and its processes: kinds and fixed parts, as plain structs.
 *
 * pp1q_transport/local/messages.py explains the fields; a test compares every size and offset. Little-endian, naturally aligned. A field
 * named `zero` must be zero. Moves nothing: pp1q_sidecar.h does.
 */
#ifndef PP1Q_RECORDS_H
#define PP1Q_RECORDS_H

#include <stdint.h>

enum pp1q_kind {
    PP1Q_OPEN = 1,
    PP1Q_STEP = 2,
    PP1Q_COMMIT = 3,
    PP1Q_RELEASE = 4,
    PP1Q_CLOSE = 5,
    PP1Q_AGREE = 6,
    PP1Q_EXCHANGE = 7,
    PP1Q_UP = 16,
    PP1Q_DOWN = 17,
    PP1Q_READY = 18,
    PP1Q_DISCARDED = 19,
    PP1Q_COMMITTED = 20,
    PP1Q_REFUSED = 21,
    PP1Q_EPOCH = 22,
    PP1Q_DRAINING = 23,
    PP1Q_EXCHANGED = 24,
    PP1Q_TARGET_UP = 32,
    PP1Q_TARGET_DOWN = 33,
    PP1Q_OPENED = 34,
    PP1Q_COMMITTED_TOKENS = 35,
    PP1Q_RESET = 36,
    PP1Q_CLOSED = 37,
    PP1Q_STEP_FOR_DRAFT = 38,
    PP1Q_TOKEN = 39,
    PP1Q_PUT = 48,
    PP1Q_FAIL = 49,
    PP1Q_PUT_SHARD = 50,
    PP1Q_PING = 61,
    PP1Q_PONG = 62,
    PP1Q_BYE = 63,
};

enum pp1q_epoch_state { PP1Q_EPOCH_ENDED = 1, PP1Q_EPOCH_AGREE = 2, PP1Q_EPOCH_OPEN = 3 };

enum { PP1Q_MAX_TEXT_BYTES = 512, PP1Q_RECORD_HEADER_BYTES = 8 };

/* What precedes every record in a ring; `length` counts these eight bytes too. */
struct pp1q_record {
    uint32_t length;
    uint16_t kind, zero;
};

/* target -> daemon */

struct pp1q_open {
    uint64_t request, seed;
    uint32_t max_position, generation, round, count;
}; /* then int32_t tokens[count] */

struct pp1q_step {
    uint64_t request, ticket, target_context, trace_id;
    double temperature;
    uint32_t generation, round, depth, support, budget_us, owner; /* owner: the rank, where group_mode is 2; else any */
};

struct pp1q_commit {
    uint64_t request;
    uint32_t slot, slot_generation, round, source, accepted, count, epoch, generation;
}; /* then int32_t tokens[count] */

struct pp1q_release {
    uint32_t slot, slot_generation;
};

struct pp1q_close {
    uint64_t request;
};

struct pp1q_agree {
    uint32_t epoch, count;
    uint64_t digest_low, digest_high;
};

/* One rank's part of an exchange between target ranks: proto/spec.md, "Exchanges", has purposes and elements. */
struct pp1q_exchange {
    uint64_t request;
    uint32_t epoch, sequence, generation, round, position, purpose, first_id, end_id, rank, count;
}; /* then count words of 4 bytes: the elements */

/* daemon -> target */

struct pp1q_exchanged {
    uint64_t request;
    uint32_t epoch, sequence, generation, round, position, purpose, first_id, end_id, rank, count;
}; /* then count words of 4 bytes; one record a rank, in the order of ranks, once every rank has said its part */

struct pp1q_up {
    uint64_t session;
    uint32_t epoch, zero;
};

struct pp1q_down {
    uint32_t reason, goodbye;
};

struct pp1q_ready {
    uint64_t request, ticket, latency_ns;
    uint32_t slot, slot_generation, request_generation, round, anchor, depth, representation, epoch; /* representation 0: another rank has
                                                 the rows (group_mode 2), the tokens are here */
};

struct pp1q_discarded {
    uint64_t request, ticket;
    uint32_t reason, round, generation, zero;
};

struct pp1q_committed {
    uint64_t request;
    uint32_t round, epoch;
};

struct pp1q_refused {
    uint64_t request, ticket;
    uint32_t reason, length;
}; /* then `length` bytes of UTF-8 */

struct pp1q_epoch {
    uint32_t epoch, state, reason, life;
};

struct pp1q_draining {
    uint32_t deadline_ms, zero;
};

/* daemon -> draft */

struct pp1q_target_up {
    uint32_t target, zero;
    uint64_t session;
};

struct pp1q_target_down {
    uint32_t target, reason;
};

struct pp1q_opened {
    uint64_t request, seed;
    uint32_t target, max_position, generation, count;
}; /* then int32_t tokens[count] */

struct pp1q_committed_tokens {
    uint64_t request;
    uint32_t target, source, accepted, count;
}; /* then int32_t tokens[count] */

struct pp1q_reset {
    uint64_t request;
    uint32_t target, reason, slot, slot_generation;
};

struct pp1q_closed {
    uint64_t request;
    uint32_t target, zero;
};

struct pp1q_step_for_draft {
    uint64_t request, seed, target_context, trace_id, received_ns;
    double temperature;
    uint32_t target, slot, slot_generation, request_generation, round, anchor, depth, representation, support, budget_us;
};

struct pp1q_token { /* to a draft's rank above 0: what rank 0 drew */
    uint32_t target, slot, slot_generation, position;
    int32_t token;
    uint32_t zero;
};

/* draft -> daemon; `session` is that of the TARGET_UP under which the STEP came: another one's slots have the same numbers */

struct pp1q_put {
    uint64_t session;
    uint32_t target, slot, slot_generation, position;
    int32_t token;
    uint32_t entries, length, zero;
};

struct pp1q_fail {
    uint64_t session;
    uint32_t target, slot, slot_generation, reason;
};

struct pp1q_put_shard { /* of a draft's rank above 0: its range of a row, for the token it was told */
    uint64_t session;
    uint32_t target, slot, slot_generation, position, entries, length, shard_mass, mass_before;
};

/* both */

struct pp1q_ping { /* a process asks for an empty answer */
    uint64_t token;
};

struct pp1q_pong {
    uint64_t token;
};

struct pp1q_bye {
    uint32_t reason, zero;
};

#endif

/* A target process without Python: attaches to a receiver's daemon, asks for one proposal, reads its tokens and their q, lets go.
 *
 *     read_slot SOCKET [RANK [TOKEN...]]        the tokens are the prompt
 *
 * A real target would now run its model over the tokens and verify them against q (docs, verify.py); this one commits nothing.
 * Ends with 0 when a proposal was read, 3 when it was discarded, 1 for everything else.
 */
#include "pp1q_sidecar.h"

#include <inttypes.h>
#include <stdio.h>

enum { REPRESENTATION_DENSE = 1, PATIENCE_MS = 10000, MAX_PROMPT = 64 };

static const uint64_t REQUEST = 1, SEED = 42, TICKET = 7;

static int complain(const char *what, int64_t failed)
{
    fprintf(stderr, "read_slot: %s: %s\n", what, strerror((int)-failed));
    return 1;
}

/* The next record of one of these kinds, or of DISCARDED, REFUSED, BYE; anything else is passed over. Its length, or -errno. */
static int64_t await(struct pp1q_attachment *a, uint16_t wanted, uint16_t *kind, const uint8_t **body)
{
    for (;;) {
        int64_t length = pp1q_receive(a, kind, body);

        if (length == -EAGAIN) {
            int failed = pp1q_wait(a, PATIENCE_MS);

            if (failed != 0)
                return failed;
        } else if (length < 0 || *kind == wanted || *kind == PP1Q_DISCARDED || *kind == PP1Q_REFUSED || *kind == PP1Q_BYE) {
            return length;
        }
    }
}

/* q of `token` in a row that the daemon has validated, so that neither leads out of it; 0 when a sparse row does not hold it. */
static float q_of(const uint8_t *row, uint32_t representation, uint32_t entries, int32_t token)
{
    const float *q = (const float *)(const void *)row;
    const int32_t *ids = (const int32_t *)(const void *)(row + 4 * (size_t)entries);
    uint32_t entry;

    if (representation == REPRESENTATION_DENSE)
        return q[token];
    for (entry = 0; entry < entries; entry++)
        if (ids[entry] == token)
            return q[entry];
    return 0.0f;
}

static void print_proposal(const struct pp1q_attachment *a, const struct pp1q_ready *ready)
{
    const uint8_t *slots = a->regions[0];
    const int32_t *tokens = (const int32_t *)(const void *)(slots + pp1q_meta_offset(&a->answer, ready->slot));
    const uint32_t *entries = (const uint32_t *)(const void *)(tokens + a->answer.depth);
    uint32_t row;

    printf("round %" PRIu32 " ready after %" PRIu64 " ns: %" PRIu32 " tokens after position %" PRIu32 "\n", ready->round,
           ready->latency_ns, ready->depth, ready->anchor);
    for (row = 0; row < ready->depth; row++)
        printf("token %" PRId32 " q %.9g\n", tokens[row],
               (double)q_of(slots + pp1q_row_offset(&a->answer, ready->slot, row), ready->representation, entries[row], tokens[row]));
}

static int ask(struct pp1q_attachment *a, const int32_t *prompt, uint32_t count)
{
    struct pp1q_open opened = {.request = REQUEST, .seed = SEED, .max_position = a->answer.max_context_tokens, .count = count};
    struct pp1q_step step = {.request = REQUEST, .ticket = TICKET, .temperature = 1.0, .depth = a->answer.depth,
                             .budget_us = PATIENCE_MS * 1000};
    int failed;

    if ((a->answer.flags & PP1Q_DENSE) == 0)
        step.support = a->answer.support; /* 0 asks for dense rows */
    failed = pp1q_send(a, PP1Q_OPEN, &opened, sizeof opened, prompt, 4 * (size_t)count);
    if (failed == 0)
        failed = pp1q_send(a, PP1Q_STEP, &step, sizeof step, NULL, 0);
    pp1q_flush(a); /* one bell for both */
    return failed;
}

static int let_go(struct pp1q_attachment *a, const struct pp1q_ready *ready)
{
    struct pp1q_release release = {ready->slot, ready->slot_generation};
    struct pp1q_close closed = {REQUEST};
    struct pp1q_bye bye = {0, 0};
    int failed = pp1q_send(a, PP1Q_RELEASE, &release, sizeof release, NULL, 0);

    if (failed == 0)
        failed = pp1q_send(a, PP1Q_CLOSE, &closed, sizeof closed, NULL, 0);
    if (failed == 0)
        failed = pp1q_send(a, PP1Q_BYE, &bye, sizeof bye, NULL, 0);
    pp1q_flush(a);
    return failed;
}

static int run(struct pp1q_attachment *a, const int32_t *prompt, uint32_t count)
{
    struct pp1q_ready ready;
    const uint8_t *body = NULL;
    uint16_t kind = 0;
    int64_t length = await(a, PP1Q_UP, &kind, &body);
    int failed;

    if (length < 0 || kind != PP1Q_UP)
        return complain("no session came up", length < 0 ? length : -ECONNRESET);
    failed = ask(a, prompt, count);
    if (failed != 0)
        return complain("can't ask for a proposal", failed);
    length = await(a, PP1Q_READY, &kind, &body);
    if (length < 0)
        return complain("no proposal came", length);
    if (kind == PP1Q_DISCARDED && length == sizeof(struct pp1q_discarded)) {
        fprintf(stderr, "read_slot: discarded, reason %" PRIu32 "\n", ((const struct pp1q_discarded *)(const void *)body)->reason);
        return 3;
    }
    if (kind == PP1Q_REFUSED && length >= (int64_t)sizeof(struct pp1q_refused)) {
        const int words = (int)(length - (int64_t)sizeof(struct pp1q_refused));

        fprintf(stderr, "read_slot: refused: %.*s\n", words, (const char *)body + sizeof(struct pp1q_refused));
        return 1;
    }
    if (kind != PP1Q_READY || length != sizeof ready)
        return complain("the daemon says goodbye", -ECONNRESET);
    memcpy(&ready, body, sizeof ready);
    if (a->answer.regions < 1 || ready.slot >= a->answer.max_slots || ready.depth > a->answer.depth)
        return complain("a slot that does not exist", -EPROTO);
    print_proposal(a, &ready);
    failed = let_go(a, &ready);
    return failed != 0 ? complain("can't release the slot", failed) : 0;
}

int main(int argc, char **argv)
{
    struct pp1q_attachment attachment;
    int32_t prompt[MAX_PROMPT] = {1, 2, 3};
    uint32_t count = 3;
    int outcome, each;

    if (argc < 2 || argc > 3 + MAX_PROMPT) {
        fprintf(stderr, "usage: read_slot SOCKET [RANK [TOKEN...]]    for example: read_slot /run/pp1q-receiver-0/receiver.sock 0 1 2 3\n");
        return 1;
    }
    for (each = 3; each < argc; each++) {
        prompt[each - 3] = (int32_t)strtol(argv[each], NULL, 10);
        count = (uint32_t)(each - 2);
    }
    outcome = pp1q_attach(&attachment, argv[1], PP1Q_RECEIVER_TARGET, argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 0, 5000);
    if (outcome > 0) {
        fprintf(stderr, "read_slot: the daemon refuses (reason %d): %s\n", outcome, attachment.text);
        return 1;
    }
    if (outcome < 0)
        return complain(argv[1], outcome);
    outcome = run(&attachment, prompt, count);
    pp1q_detach(&attachment);
    return outcome;
}

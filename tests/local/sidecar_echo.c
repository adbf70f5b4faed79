/* Sends every record back as it came, swallows those of kind 62, ends at kind 63: what the header's tests talk to. */
#include "pp1q_sidecar.h"

#include <stdio.h>

int main(int argc, char **argv)
{
    struct pp1q_attachment a;
    const uint8_t *body = NULL;
    uint16_t kind = 0;
    int64_t length;
    int failed = argc == 2 ? pp1q_attach(&a, argv[1], PP1Q_LEADER_DRAFT, 5, 5000) : 1;

    if (failed != 0) {
        printf("attach %d %s\n", failed, argc == 2 ? a.text : "");
        return 1;
    }
    if (a.answer.regions > 0)
        a.regions[0][0] = 0xA5; /* a draft may */
    for (;;) {
        length = pp1q_receive(&a, &kind, &body);
        if (length == -EAGAIN) {
            failed = pp1q_wait(&a, 20000);
            if (failed != 0)
                break;
            continue;
        }
        if (length < 0 || kind == 63)
            break;
        if (kind == 62)
            continue;
        while ((failed = pp1q_send(&a, (enum pp1q_kind)kind, body, (size_t)length / 2, body + length / 2,
                                   (size_t)length - (size_t)length / 2)) == -EAGAIN) {
            pp1q_flush(&a);
            usleep(50);
        }
        if (failed != 0)
            break;
        if (kind % 3 == 0)
            pp1q_flush(&a);
    }
    printf("end %lld %d\n", (long long)(length < 0 ? length : 0), failed);
    pp1q_detach(&a);
    pp1q_detach(&a);
    return 0;
}

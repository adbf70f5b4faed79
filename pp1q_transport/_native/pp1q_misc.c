/* Random numbers (SPEC section 5), the prefix digest (SPEC section 2) and the clock. */
#include <string.h>
#include <time.h>

#include "pp1q_kernels.h"

void pp1q_philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0;
        uint64_t b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

void pp1q_draw_words(uint64_t seed, uint32_t domain, uint32_t generation, uint32_t round, uint32_t position,
                     uint32_t out[4])
{
    /* The draw counter (low 24 bits of word 0) is 0 in this ABI. */
    const uint32_t counter[4] = {domain << 24, position, round, generation};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    pp1q_philox4x32(counter, key, out);
}

void pp1q_prefix_digest(uint64_t digest[2], const int32_t *tokens, size_t n)
{
    uint8_t link[20];
    for (size_t i = 0; i < n; i++) {
        memcpy(link, digest, 16);
        memcpy(link + 16, tokens + i, 4);
        pp1q_ops->hash128(link, sizeof link, digest);
    }
}

int64_t pp1q_monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Which level runs: asked of the CPU once, at import. Also the names of reasons and the floating-point bracket. */
#include <string.h>

#include "pp1q_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

const struct pp1q_ops *pp1q_ops = &pp1q_ops_base;

const struct pp1q_ops *pp1q_level(size_t index)
{
    const struct pp1q_ops *levels[4] = {&pp1q_ops_base, NULL, NULL, NULL};
#if defined(__x86_64__)
    size_t known = 1;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")) {
        levels[known++] = &pp1q_ops_avx2;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            levels[known++] = &pp1q_ops_avx512;
    }
#endif
    return index < 4 ? levels[index] : NULL;
}

void pp1q_level_init(void)
{
    for (size_t index = 0; pp1q_level(index) != NULL; index++)
        pp1q_ops = pp1q_level(index);
}

int pp1q_level_select(const char *name)
{
    for (size_t index = 0; pp1q_level(index) != NULL; index++)
        if (strcmp(pp1q_level(index)->name, name) == 0) {
            pp1q_ops = pp1q_level(index);
            return 0;
        }
    return -1;
}

const char *pp1q_reason_name(int code)
{
#define REASON_NAME(name) #name,
    static const char *const names[] = {PP1Q_REASONS(REASON_NAME)};
#undef REASON_NAME
    return code >= 1 && code < PP1Q_E_END ? names[code - 1] : NULL;
}

uint64_t pp1q_fp_enter(void)
{
#if defined(__x86_64__)
    uint32_t saved = _mm_getcsr();
    if ((saved & 0xFFC0u) != 0x1F80u) /* all but the sticky status flags */
        _mm_setcsr(0x1F80u);
    return saved;
#elif defined(__aarch64__)
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    if (saved != 0)
        __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
    return saved;
#else
    return 0;
#endif
}

void pp1q_fp_leave(uint64_t saved)
{
#if defined(__x86_64__)
    if ((saved & 0xFFC0u) != 0x1F80u)
        _mm_setcsr((uint32_t)saved);
#elif defined(__aarch64__)
    if (saved != 0)
        __asm__ volatile("msr fpcr, %0" : : "r"(saved) : "memory");
#else
    (void)saved;
#endif
}

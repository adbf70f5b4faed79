/* The AVX2 level of x86-64; empty elsewhere. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdlib.h>
#pragma GCC target("avx2,bmi,bmi2")
#define XXH_VECTOR 2 /* XXH_AVX2, whose name the header defines only later */
#define LEVEL_NAME avx2
#define VECTOR_BYTES 32
#include "pp1q_level.h"
#else
typedef int pp1q_avx2_is_empty_here;
#endif

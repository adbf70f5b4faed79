/* The AVX-512 level of x86-64 (F, BW, DQ, VL: what x86-64-v4 names); empty elsewhere. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stdlib.h>
#pragma GCC target("avx2,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define XXH_VECTOR 3 /* XXH_AVX512, whose name the header defines only later */
#define LEVEL_NAME avx512
#define VECTOR_BYTES 64
#include "pp1q_level.h"
#else
typedef int pp1q_avx512_is_empty_here;
#endif

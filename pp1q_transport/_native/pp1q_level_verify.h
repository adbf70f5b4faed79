/* The vector loops of verification, once per instruction set like pp1q_level.h, which includes this file. Between those
 * and pp1q_verify.c; no function here is public.
 *
 * Weights of the target become integers in FP64 below 2^51; every sum and product of them stays an exact integer (or an
 * exact multiple of 2^-24), so that no order of additions, no width and no fused operation can change a bit.
 */
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define TO_INTEGER 0x1p52 /* x + 2^52 - 2^52 is the integer nearest to x, ties to even, for 0 <= x <= 2^52 */

/* FP32 values to FP64. Intrinsics where there are any: GCC's own conversion of a vector goes half by half. */
ALWAYS_INLINE vf64 widen(const uint8_t *from)
{
#if defined(__x86_64__) && VECTOR_BYTES == 64
    return (vf64)_mm512_cvtps_pd(_mm256_loadu_ps((const float *)(const void *)from));
#elif defined(__x86_64__) && VECTOR_BYTES == 32
    return (vf64)_mm256_cvtps_pd(_mm_loadu_ps((const float *)(const void *)from));
#elif defined(__x86_64__)
    return (vf64)_mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(const void *)from)));
#else
    float v __attribute__((vector_size(VECTOR_BYTES / 2)));
    memcpy(&v, from, sizeof v);
    return __builtin_convertvector(v, vf64);
#endif
}

ALWAYS_INLINE vf64 load_weight(const uint8_t *weights, size_t i, int wide)
{
    vf64 v;
    if (!wide)
        return widen(weights + 4 * i);
    memcpy(&v, weights + 8 * i, sizeof v);
    return v;
}

ALWAYS_INLINE double weight_at(const uint8_t *weights, size_t i, int wide)
{
    float narrow_value;
    double value;
    if (wide) {
        memcpy(&value, weights + 8 * i, sizeof value);
        return value;
    }
    memcpy(&narrow_value, weights + 4 * i, sizeof narrow_value);
    return (double)narrow_value;
}

ALWAYS_INLINE double sum64(vf64 lanes)
{
    double sum = 0.0;
    for (size_t k = 0; k < LANES64; k++)
        sum += lanes[k];
    return sum;
}

/* Leaves of the fixed tree over FP32 weights: level_block_sums with a widening load. */
static int level_narrow_sums(const uint8_t *weights, size_t n, double *out)
{
    vu64 seen = {0};
    for (size_t i = 0; i < n; i += PP1Q_TREE) {
        vf64 part[16 / LANES64];
#pragma GCC unroll 8
        for (size_t k = 0; k < 16 / LANES64; k++) {
            vf64 low = widen(weights + 4 * (i + k * LANES64));
            vf64 high = widen(weights + 4 * (i + 16 + k * LANES64));
            seen |= UNUSABLE((vu64)low) | UNUSABLE((vu64)high);
            part[k] = low + high;
        }
#pragma GCC unroll 4
        for (size_t half = 8 / LANES64; half > 0; half /= 2)
#pragma GCC unroll 4
            for (size_t k = 0; k < half; k++)
                part[k] += part[k + half];
        out[i / PP1Q_TREE] = halve(part[0]);
    }
    return (any64(seen) >> 63) != 0;
}

ALWAYS_INLINE double fixed_sum(const uint8_t *weights, size_t n, double scale, int wide)
{
    vf64 chains[4] = {{0}};
    double tail = 0.0;
    size_t i = 0;
    for (; i + 4 * LANES64 <= n; i += 4 * LANES64) {
#pragma GCC unroll 4
        for (size_t k = 0; k < 4; k++)
            chains[k] += (load_weight(weights, i + k * LANES64, wide) * scale + TO_INTEGER) - TO_INTEGER;
    }
    for (; i < n; i++)
        tail += (weight_at(weights, i, wide) * scale + TO_INTEGER) - TO_INTEGER;
    return sum64((chains[0] + chains[1]) + (chains[2] + chains[3])) + tail;
}

static double level_fixed_sum(const uint8_t *weights, size_t n, int wide, double scale)
{
    return wide ? fixed_sum(weights, n, scale, 1) : fixed_sum(weights, n, scale, 0);
}

/* With W = upper * 2^24 + lower: w*M - c*W = M * ((w - c*upper) - q*lower), and both terms in brackets are exact. The sum
 * of the second over a whole q is below 2^24, that of the first below 2^52. `upper` comes multiplied by M. */
ALWAYS_INLINE void residual_sums(const uint8_t *weights, const uint8_t *q, size_t n, const struct pp1q_scale *s, int wide,
                                 double out[2])
{
    vf64 whole[2] = {{0}}, part[2] = {{0}};
    double tail_whole = 0.0, tail_part = 0.0;
    size_t i = 0;
    for (; i + 2 * LANES64 <= n; i += 2 * LANES64) {
#pragma GCC unroll 2
        for (size_t k = 0; k < 2; k++) {
            vf64 w = (load_weight(weights, i + k * LANES64, wide) * s->scale + TO_INTEGER) - TO_INTEGER;
            vf64 c = widen(q + 4 * (i + k * LANES64));
            vf64 a = w - c * s->upper;
            vf64 b = c * s->lower;
            vu64 positive = (vu64)(a > b);
            whole[k] += (vf64)((vu64)a & positive);
            part[k] += (vf64)((vu64)b & positive);
        }
    }
    for (; i < n; i++) {
        float c;
        double a, b;
        memcpy(&c, q + 4 * i, sizeof c);
        a = ((weight_at(weights, i, wide) * s->scale + TO_INTEGER) - TO_INTEGER) - (double)c * s->upper;
        b = (double)c * s->lower;
        if (a > b) {
            tail_whole += a;
            tail_part += b;
        }
    }
    out[0] = sum64(whole[0] + whole[1]) + tail_whole;
    out[1] = sum64(part[0] + part[1]) + tail_part;
}

static void level_residual(const uint8_t *weights, const uint8_t *q, size_t n, int wide, const struct pp1q_scale *s,
                           double out[2])
{
    if (wide)
        residual_sums(weights, q, n, s, 1, out);
    else
        residual_sums(weights, q, n, s, 0, out);
}

/* block.h - formats whose elements share a scale. A template, as body.h is. */
#ifndef RINGCOMM_KERNELS_BLOCK_H
#define RINGCOMM_KERNELS_BLOCK_H

enum { BLOCK_MAX = 256, BLOCK_LANES = 32 };

#define BLOCK_NAN 0x7fc0

static inline uint32_t block_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float block_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline int block_finite(float value)
{
    return (block_bits(value) & 0x7f800000) != 0x7f800000;
}

/* c of one block, zeros after the last. */
static inline void block_take(float *c, const float *src, float pre, const float *residual,
                              size_t n)
{
    for (size_t i = 0; i < n; i++)
        c[i] = residual ? src[i] * pre + residual[i] : src[i] * pre;
    for (size_t i = n; i < BLOCK_MAX; i++)
        c[i] = 0.0f;
}

/* The scale by which the largest magnitude becomes at most limit; 0 for a zero block, NaN for a
 * poisoned one. */
static inline float block_scale_by_top(const float *c, float limit)
{
    uint32_t top = 0;
    for (size_t i = 0; i < BLOCK_MAX; i++) {
        const uint32_t size = block_bits(c[i]) & 0x7fffffff;
        top = size > top ? size : top;
    }
    if (top >= 0x7f800000)
        return block_float((uint32_t)BLOCK_NAN << 16);
    const float s = block_float((block_bits(block_float(top) / limit) + 0xffff) & 0xffff0000);
    if (s < 0x1p-126f)
        return 0.0f;
    return block_finite(s * limit) ? s : block_float((uint32_t)BLOCK_NAN << 16);
}

static inline float block_sum(float *lanes)
{
    for (size_t half = BLOCK_LANES / 2; half; half /= 2)
        for (size_t i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}

static inline float block_scale_by_mean(const float *c, size_t n)
{
    float squares[BLOCK_LANES] = {0}, sizes[BLOCK_LANES] = {0};
    for (size_t i = 0; i < BLOCK_MAX; i++) {
        const float size = block_float(block_bits(c[i]) & 0x7fffffff);
        squares[i % BLOCK_LANES] += c[i] * c[i];
        sizes[i % BLOCK_LANES] += size;
    }
    const float square = block_sum(squares);
    const float rms = __builtin_sqrtf(square / (float)n);
    const float mean = 1.75f * (block_sum(sizes) / (float)n);
    if (!block_finite(square))
        return block_float((uint32_t)BLOCK_NAN << 16);
    const uint32_t bits = block_bits(rms < mean ? rms : mean);
    const float s = block_float((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
    return s < 0x1p-126f ? 0.0f : s;
}

static inline uint32_t fp8_of(float x)
{
    const uint32_t bits = block_bits(x) & 0x7fffffff;
    const uint32_t small = block_bits(block_float(bits) + 0x1p14f) - block_bits(0x1p14f);
    const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120u << 3);
    return (bits < 121u << 23 ? small : normal) | (block_bits(x) >> 24 & 0x80);
}

static inline float fp8_value(uint8_t code)
{
    const uint32_t rest = code & 0x7f;
    const float size =
        rest < 8 ? (float)(int32_t)rest * 0x1p-9f : block_float((rest << 20) + (120u << 23));
    return code & 0x80 ? -size : size;
}

static inline float onebit_d(float s, int bit)
{
    return s == 0.0f ? 0.0f : bit ? s : -s;
}

/* NUMBER(code, i): D / s of element i. PUT(codes, i, x): the code of x = c / s. */
#define INT8_NUMBER(codes, i) (float)(int8_t)(codes)[i]
#define INT4_NUMBER(codes, i) (float)(((codes)[(i) % 32] >> ((i) / 32 * 4) & 15) ^ 8) - 8.0f
#define FP8_NUMBER(codes, i) fp8_value((codes)[i])
#define INT_OF(x) (int32_t)(block_bits((x) + 0x1.8p23f) - block_bits(0x1.8p23f))

#define SCALED_D(number, s) ((number) * (s))
#define ONEBIT_NUMBER(codes, i) (int)((codes)[(i) / 8] >> ((i) % 8) & 1)
#define ONEBIT_D(number, s) onebit_d(s, number)

#define BLOCK_FORMAT(name, block, bytes, scale, put, number, d)                                    \
    static int name##_encode(uint16_t *scales, uint8_t *codes, float *left, const float *src,      \
                             float pre, const float *residual, size_t n, int far)                  \
    {                                                                                              \
        int poisoned = 0;                                                                          \
        (void)far;                                                                                 \
        for (size_t at = 0; at < n; at += (block)) {                                               \
            const size_t count = n - at < (block) ? n - at : (block);                              \
            const size_t size = (bytes) == (block) ? count : (bytes);                              \
            float c[BLOCK_MAX];                                                                    \
            uint8_t code[BLOCK_MAX] = {0};                                                         \
            block_take(c, src + at, pre, residual ? residual + at : NULL, count);                  \
            const float s = scale;                                                                 \
            const float inv = 1.0f / s;                                                            \
            for (size_t i = 0; i < count && s == s && s != 0.0f; i++)                              \
                put;                                                                               \
            (void)inv;                                                                             \
            poisoned |= s != s;                                                                    \
            for (size_t i = 0; left && i < count; i++)                                             \
                left[at + i] = s == s ? c[i] - d(number(code, i), s)                               \
                                      : block_float((uint32_t)BLOCK_NAN << 16);                    \
            scales[at / (block)] = (uint16_t)(block_bits(s) >> 16);                                \
            memcpy(codes + at / (block) * (bytes), code, size);                                    \
        }                                                                                          \
        return poisoned;                                                                           \
    }                                                                                              \
    static int name##_decode(float *dst, const uint16_t *scales, const uint8_t *codes, size_t n,   \
                             int far)                                                              \
    {                                                                                              \
        int poisoned = 0;                                                                          \
        (void)far;                                                                                 \
        for (size_t at = 0; at < n; at++) {                                                        \
            const uint8_t *code = codes + at / (block) * (bytes);                                  \
            const float s = block_float((uint32_t)scales[at / (block)] << 16);                     \
            poisoned |= !block_finite(s);                                                          \
            dst[at] = block_finite(s) ? d(number(code, at % (block)), s)                           \
                                      : block_float((uint32_t)BLOCK_NAN << 16);                    \
        }                                                                                          \
        return poisoned;                                                                           \
    }                                                                                              \
    static int name##_add(float *acc, const uint16_t *scales, const uint8_t *codes, size_t n)      \
    {                                                                                              \
        int poisoned = 0;                                                                          \
        for (size_t at = 0; at < n; at++) {                                                        \
            const uint8_t *code = codes + at / (block) * (bytes);                                  \
            const float s = block_float((uint32_t)scales[at / (block)] << 16);                     \
            poisoned |= !block_finite(s);                                                          \
            acc[at] = block_finite(s) ? acc[at] + d(number(code, at % (block)), s)                 \
                                      : block_float((uint32_t)BLOCK_NAN << 16);                    \
        }                                                                                          \
        return poisoned;                                                                           \
    }

BLOCK_FORMAT(int8, 256, 256, block_scale_by_top(c, 127.0f), code[i] = (uint8_t)INT_OF(c[i] * inv),
             INT8_NUMBER, SCALED_D)
BLOCK_FORMAT(int4, 64, 32, block_scale_by_top(c, 7.0f),
             code[i % 32] = (uint8_t)(code[i % 32] | ((INT_OF(c[i] * inv) & 15) << i / 32 * 4)),
             INT4_NUMBER, SCALED_D)
BLOCK_FORMAT(onebit, 256, 32, block_scale_by_mean(c, count),
             code[i / 8] = (uint8_t)(code[i / 8] | (c[i] >= 0.0f) << i % 8), ONEBIT_NUMBER,
             ONEBIT_D)
BLOCK_FORMAT(fp8, 256, 256, block_scale_by_top(c, 448.0f), code[i] = (uint8_t)fp8_of(c[i] * inv),
             FP8_NUMBER, SCALED_D)

#endif

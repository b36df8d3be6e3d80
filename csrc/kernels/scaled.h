/* scaled.h - the functions of one format that scales by the largest magnitude. A template: block.h
 * includes it once per format, without an include guard. Its parameters are undefined again at the
 * end:
 *   FORMAT, BLOCK, BYTES    see blockwise.h
 *   LIMIT                   the largest number that a code is
 *   SPAN, STEP, GAP         elements i and i + GAP, LANES of each, have their codes from byte i on,
 *                           for i = 0, STEP, ... below SPAN
 *   ROUND, LOAD             (codes, &x, &y), see block.h
 */

static inline float FORMAT(encode_block)(uint8_t *codes, float *left, const float *src, vec pre,
                                         const float *residual, size_t n, int stream)
{
    (void)n;
    float c[BLOCK];
    vec top = vec_set(0.0f);
    for (size_t i = 0; i < BLOCK; i += LANES) {
        const vec x = block_take(src + i, pre, residual ? residual + i : NULL);
        vec_store(c + i, x);
        top = vec_top(top, x);
    }
    const float s = block_scale_by_top(vec_top_of(top), LIMIT);
    if (!(s > 0.0f)) {
        memset(codes, 0, BYTES);
        block_left_whole(left, c, s, BLOCK);
        return s;
    }
    const vec inverse = vec_set(1.0f / s);
    const vec scale = vec_set(s);
    for (size_t i = 0; i < SPAN; i += STEP) {
        const vec c0 = vec_load(c + i), c1 = vec_load(c + i + GAP);
        vec x = vec_mul(c0, inverse), y = vec_mul(c1, inverse);
        ROUND(codes + i, &x, &y);
        if (left) {
            block_put(left + i, vec_sub(c0, vec_mul(x, scale)), stream);
            block_put(left + i + GAP, vec_sub(c1, vec_mul(y, scale)), stream);
        }
    }
    return s;
}

static inline int FORMAT(decode_block)(float *dst, float s, const uint8_t *codes, int stream)
{
    if (!block_finite(s)) {
        block_fill(dst, float_of((uint32_t)BLOCK_NAN << 16), BLOCK);
        return 1;
    }
    const vec scale = vec_set(s);
    for (size_t i = 0; i < SPAN; i += STEP) {
        vec x, y;
        LOAD(codes + i, &x, &y);
        block_put(dst + i, vec_mul(x, scale), stream);
        block_put(dst + i + GAP, vec_mul(y, scale), stream);
    }
    return 0;
}

static inline int FORMAT(add_block)(float *acc, float s, const uint8_t *codes)
{
    if (!block_finite(s)) {
        block_fill(acc, float_of((uint32_t)BLOCK_NAN << 16), BLOCK);
        return 1;
    }
    const vec scale = vec_set(s);
    for (size_t i = 0; i < SPAN; i += STEP) {
        vec x, y;
        LOAD(codes + i, &x, &y);
        vec_store(acc + i, vec_add(vec_load(acc + i), vec_mul(x, scale)));
        vec_store(acc + i + GAP, vec_add(vec_load(acc + i + GAP), vec_mul(y, scale)));
    }
    return 0;
}

#include "blockwise.h"

#undef LIMIT
#undef SPAN
#undef STEP
#undef GAP
#undef ROUND
#undef LOAD

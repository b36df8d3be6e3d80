/* draw.h - pseudo-random numbers, and elements of any dtype made of them. */
#ifndef RINGCOMM_TEST_DRAW_H
#define RINGCOMM_TEST_DRAW_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/kernels/kernels.h"

static inline uint64_t draw(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state * 2685821657736338717u;
}

/* 0 .. bound-1 */
static inline uint64_t draw_below(uint64_t *state, uint64_t bound)
{
    return (draw(state) >> 16) % bound;
}

/* A number that depends on x alone. */
static inline uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Element i of n whole numbers that int2 encodes exactly: what codes are rotated to. Blocks that
 * are cut short are zeros. */
static inline int64_t draw_rotated(uint64_t salt, uint64_t i, uint64_t n)
{
    enum { BLOCK = 64 };
    uint64_t first = i - i % BLOCK, x = i % BLOCK;
    int64_t sum = 0;
    if (first + BLOCK > n)
        return 0;
    for (uint64_t at = 0; at < BLOCK; at++) {
        uint64_t bits = mix(salt ^ (first + at));
        int64_t level = bits & 6 ? 3 : 10;
        sum += ((uint64_t)__builtin_popcountll(at & x) + bits) % 2 != 0 ? level : -level;
    }
    return ((x & x >> 1) ^ (x >> 2 & x >> 3) ^ (x >> 4 & x >> 5)) & 1 ? -sum : sum;
}

/* n elements of ordinary size; integers of any size. No NaN, whose payloads are unspecified. */
static inline void fill_random(void *data, rc_dtype dtype, size_t n, uint64_t *state)
{
    const kernel_half *fp16 = &kernels_at(0)->fp16, *bf16 = &kernels_at(0)->bf16;
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = draw(state);
        double ordinary = ldexp((double)(int64_t)bits, -62 - (int)draw_below(state, 12));
        float rounded = (float)ordinary;
        switch (dtype) {
        case RC_F16: fp16->encode((uint16_t *)data + i, &rounded, 1.0F, 1); break;
        case RC_BF16: bf16->encode((uint16_t *)data + i, &rounded, 1.0F, 1); break;
        case RC_F32: ((float *)data)[i] = rounded; break;
        case RC_F64: ((double *)data)[i] = ordinary; break;
        default: memcpy((char *)data + i * rc_dtype_size(dtype), &bits, rc_dtype_size(dtype));
        }
    }
}

#endif

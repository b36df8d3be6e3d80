/* operands.h - what the tests of the kernels share: sizes, factors, random operands of every class
 * of value, and buffers that show a write or read beyond their end.
 */
#ifndef RINGCOMM_TEST_OPERANDS_H
#define RINGCOMM_TEST_OPERANDS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/kernels/kernels.h"
#include "check.h"

static const size_t sizes[] = {0, 1, 7, 8, 15, 16, 17, 31, 33, 255, 256, 257, 1000};
static const float factors[] = {1.0f, 0.25f, 1.0f / 3.0f, -1.5f, 0.0f, 1e30f, 1e-30f};

enum { GUARD = 64, GUARD_BYTE = 0xa5 }; /* bytes after a destination, and what they hold */
enum alias { ALIAS_NONE, ALIAS_A, ALIAS_B, ALIAS_COUNT };

static inline uint64_t random_bits(void)
{
    static uint64_t state = 88172645463325252u;
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 2685821657736338717u;
}

static inline size_t size_of(rc_dtype dtype)
{
    static const size_t bytes[RC_DTYPE_COUNT] = {2, 2, 4, 8, 1, 1, 4, 8};
    return bytes[dtype];
}

/* Any bits at all; one in four an extreme of its dtype; one in four a float of ordinary size. */
static inline void fill(void *data, rc_dtype dtype, size_t n)
{
    static const uint32_t f32[] = {0,          0x80000000, 0x7f800000, 0xff800000, 0x7fc00001,
                                   0xff812345, 1,          0x807fffff, 0x7f7fffff, 0x33800000};
    static const uint64_t f64[] = {0,
                                   1ull << 63,
                                   0x7ffull << 52,
                                   0xfffull << 52,
                                   0x7ff8ull << 48,
                                   0xfff0000000000001,
                                   1,
                                   0x800fffffffffffff,
                                   0x7fefffffffffffff};
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = random_bits();
        const unsigned kind = (unsigned)(random_bits() >> 40) % 4;
        const size_t pick = (size_t)(random_bits() >> 40);
        const double ordinary = (double)(int64_t)bits * 0x1p-60;
        const float ordinary_f32 = (float)ordinary;
        if (kind == 0 && dtype == RC_F32)
            bits = f32[pick % CHECK_COUNT(f32)];
        else if (kind == 0 && dtype == RC_F64)
            bits = f64[pick % CHECK_COUNT(f64)];
        else if (kind == 0)
            bits = (pick & 1 ? 0 : ~0ull) ^ (pick & 2 ? 1ull << (8 * size_of(dtype) - 1) : 0);
        else if (kind == 1 && dtype == RC_F32)
            memcpy(&bits, &ordinary_f32, sizeof ordinary_f32);
        else if (kind == 1 && dtype == RC_F64)
            memcpy(&bits, &ordinary, sizeof ordinary);
        memcpy((char *)data + i * size_of(dtype), &bits, size_of(dtype));
    }
}

/* A block that ends with its last byte, so that the address sanitizer sees a read beyond. */
static inline void *make(size_t offset, size_t bytes)
{
    const size_t total = offset + bytes;
    unsigned char *block = malloc(total ? total : 1);
    if (!block)
        abort();
    memset(block, GUARD_BYTE, total);
    return block + offset;
}

static inline void drop(void *data, size_t offset)
{
    free((unsigned char *)data - offset);
}

static inline int guard_holds(const void *data, size_t bytes)
{
    for (size_t i = 0; i < GUARD; i++)
        if (((const unsigned char *)data)[bytes + i] != GUARD_BYTE)
            return 0;
    return 1;
}

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Calls run for each supported set. */
static inline void each_set(void (*run)(const kernel_set *set))
{
    for (int i = 0; kernels_at(i); i++)
        if (kernels_at(i)->supported())
            run(kernels_at(i));
}

#endif

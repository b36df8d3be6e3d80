/* sparse_values.h - formats and values for the tests of csrc/sparse. */
#ifndef RINGCOMM_TESTS_SPARSE_VALUES_H
#define RINGCOMM_TESTS_SPARSE_VALUES_H

#include <stdlib.h>
#include <string.h>

#include "../../csrc/include/ringcomm_sparse.h"
#include "../../csrc/kernels/kernels.h"
#include "draw.h"

static const rc_sparse_format sparse_formats[] = {
    {16, 1, 1, RC_F32},      {16, 16, 1, RC_BF16},     {4096, 1, 64, RC_BF16},
    {4096, 1, 4096, RC_F32}, {4096, 16, 3, RC_F32},    {1008, 1, 500, RC_BF16},
    {1008, 16, 20, RC_BF16}, {65536, 16, 40, RC_BF16}, {65536, 1, 100, RC_F32},
};

static uint64_t sparse_seed = 88172645463325252u;

static inline uint32_t sparse_size_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

/* Numbers of many sizes, with equals, zeros of both signs and subnormals; some parts all zero. */
static inline float *sparse_fill(size_t n)
{
    static const float odd[] = {0.0F, -0.0F, 1.0F, -1.0F, 0x1p-149F, -0x1p-130F};
    float *x = malloc(n * sizeof *x + 1);
    for (size_t i = 0; i < n; i++) {
        double number = (double)((int)draw_below(&sparse_seed, 20001) - 10000);
        x[i] = (float)(number * (i % 7 == 0 ? 1e-6 : 1e-2));
        if (draw_below(&sparse_seed, 4) == 0)
            x[i] = odd[draw_below(&sparse_seed, 6)];
        if (i / 2048 % 3 == 1)
            x[i] = 0.0F;
    }
    return x;
}

/* All kernel sets of this CPU, one by one; NULL past the last. */
static inline const char *sparse_set(int *at)
{
    const struct kernel_set *set;
    while ((set = kernels_at((*at)++)) != NULL)
        if (set->supported())
            return set->name;
    return NULL;
}

#endif

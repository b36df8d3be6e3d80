/* vector.h - float tensors of any size whose sum over the ranks is known without a reference. */
#ifndef RINGCOMM_TEST_VECTOR_H
#define RINGCOMM_TEST_VECTOR_H

#include <stdint.h>
#include <stdlib.h>

#include "world.h"

typedef struct vector {
    float *data;
    uint64_t count;
} vector;

static inline vector make_vector(uint64_t count, int rank)
{
    vector v = {malloc(count * sizeof(float)), count};
    for (uint64_t i = 0; i < count; i++)
        v.data[i] = (float)(i % 1000 + (uint64_t)rank);
    return v;
}

static inline rc_call sum_of(const vector *v)
{
    return small_call(RC_ALLREDUCE, v->data, v->count);
}

/* Of ranks 0 to n - 1; checks the sum and frees it. */
static inline void check_sum(vector v, int n)
{
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < v.count; i++)
        wrong += v.data[i] != (float)((i % 1000) * (uint64_t)n + (uint64_t)(n * (n - 1) / 2));
    CHECK_EQ(wrong, 0);
    free(v.data);
}

#endif

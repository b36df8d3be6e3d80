/* block_flights.h - flights whose codec is one of blocks, with the package's kernels, and what the
 * formulas say of them.
 */
#ifndef RINGCOMM_TEST_BLOCK_FLIGHTS_H
#define RINGCOMM_TEST_BLOCK_FLIGHTS_H

#include <stdio.h>

#include "flights.h"
#include "quant_world.h"

static inline const char *ptx(void)
{
    static char text[1 << 19];
    if (text[0] == '\0') {
        FILE *file = fopen(KERNELS_PTX, "re");
        size_t bytes = file != NULL ? fread(text, 1, sizeof text - 1, file) : 0;
        CHECK(bytes > 0);
        if (file != NULL)
            fclose(file);
    }
    return text;
}

static inline cu_address on_device(const float *values, uint64_t count)
{
    cu_address at = 0;
    CHECK_EQ(cuMemAlloc_v2(&at, count * sizeof *values), CU_OK);
    CHECK_EQ(fake_cuda_write(at, values, count * sizeof *values), 0);
    return at;
}

static inline rc_call call_at(cu_address at, uint64_t count, rc_codec codec, rc_op op)
{
    rc_call call = flights_call(at);
    call.count = count;
    call.codec = codec;
    call.op = op;
    return call;
}

/* One step of all ranks. 1 if all have the result. */
static inline int step(const flights *all, const tensors *t, rc_feedback **feedback, rc_codec codec,
                       rc_op op, const float *want)
{
    rc_flight *in_flight[WORLD_MAX];
    cu_address at[WORLD_MAX];
    float *got = malloc(t->count * sizeof *got);
    int right = 1;
    for (int rank = 0; rank < t->size; rank++) {
        at[rank] = on_device(t->src[rank], t->count);
        rc_call call = call_at(at[rank], t->count, codec, op);
        call.feedback = feedback != NULL ? feedback[rank] : NULL;
        in_flight[rank] = flights_submit(all, rank, &call, CU_LEGACY_STREAM);
    }
    for (int rank = 0; rank < t->size; rank++) {
        CHECK_EQ(rc_flight_landed(in_flight[rank], WORLD_LONG_MS), RC_OK);
        rc_flight_free(in_flight[rank]);
        CHECK_EQ(fake_cuda_read(got, at[rank], t->count * sizeof *got), 0);
        right &= same(got, want, t->count, "result", rank);
        cuMemFree_v2(at[rank]);
    }
    free(got);
    return right;
}

#endif

/* test_format.c - records of sparse payloads: sizes by the formula, indices and values that come
 * back as they were put, and bytes that no writer makes.
 */
#include <math.h>

#include "../../csrc/sparse/payload.h"
#include "check.h"
#include "sparse_values.h"

/* 12 bits for one of 4096, of a short chunk its share, rounded up. */
static void sizes(void)
{
    const rc_sparse_format *f = &sparse_formats[2]; /* 64 of 4096 elements, bf16 */
    sparse_chunk whole = sparse_chunk_at(f, 5000, 0), last = sparse_chunk_at(f, 5000, 4096);
    CHECK_EQ(whole.kept, 64);
    CHECK_EQ(whole.index_bytes, 96);
    CHECK_EQ(whole.bytes, 96 + 128);
    CHECK_EQ(last.elems, 904);
    CHECK_EQ(last.kept, 15);
    CHECK_EQ(last.index_bytes, 23);
    CHECK_EQ(last.bytes, 23 + 30);
}

static void comes_back(const rc_sparse_format *f, uint64_t count)
{
    static uint16_t index[65536], got[65536], half[65536];
    sparse_chunk chunk = sparse_chunk_at(f, count, 0);
    for (size_t i = 0; i < chunk.kept; i++) /* spread over the chunk, the last unit among them */
        index[i] = (uint16_t)((i + 1) * chunk.units / chunk.kept - 1);
    size_t n = chunk.kept * f->block;
    float *values = sparse_fill(n), *read = malloc(n * sizeof *read + 1);
    uint8_t *record = malloc(chunk.bytes);
    uint8_t *at = sparse_put_indices(f, &chunk, record, index);
    CHECK_EQ((size_t)(at - record), chunk.index_bytes);
    sparse_put_values(f, kernels_at(0), at, values, half, n);
    const uint8_t *from = sparse_get_indices(f, &chunk, record, got);
    if (CHECK(from == at)) {
        CHECK(memcmp(index, got, chunk.kept * sizeof *got) == 0);
        sparse_get_values(f, kernels_at(0), from, read, half, n);
        CHECK(memcmp(values, read, n * sizeof *read) == 0);
    }
    free(values), free(read), free(record);
}

static void what_is_put_comes_back(void)
{
    static const uint64_t counts[] = {1, 17, 1000, 4096, 70000};
    for (size_t f = 0; f < CHECK_COUNT(sparse_formats); f++)
        for (size_t i = 0; i < CHECK_COUNT(counts); i++)
            comes_back(&sparse_formats[f], counts[i]);
}

static void indices_that_nobody_writes(void)
{
    const rc_sparse_format f = {1008, 1, 4, RC_F32};
    static const uint16_t wrong[][4] = {{1, 1, 2, 3}, {5, 4, 6, 7}, {0, 1, 2, 1008}};
    sparse_chunk chunk = sparse_chunk_at(&f, 1008, 0);
    uint8_t record[64];
    uint16_t got[4];
    for (size_t i = 0; i < CHECK_COUNT(wrong); i++) {
        sparse_put_indices(&f, &chunk, record, wrong[i]);
        CHECK(sparse_get_indices(&f, &chunk, record, got) == NULL);
    }
}

static void tells_what_is_not_finite(void)
{
    float x[40] = {0};
    CHECK_EQ(sparse_any_not_finite(x, 40), 0);
    x[39] = 0x1.fffffep127F;
    CHECK_EQ(sparse_any_not_finite(x, 40), 0);
    x[39] = -INFINITY;
    CHECK_EQ(sparse_any_not_finite(x, 40), 1);
    x[39] = NAN;
    CHECK_EQ(sparse_any_not_finite(x, 40), 1);
    CHECK_EQ(sparse_any_not_finite(x, 39), 0);
}

int main(void)
{
    const check_test tests[] = {
        {"sizes", sizes},
        {"what is put comes back", what_is_put_comes_back},
        {"indices that nobody writes are refused", indices_that_nobody_writes},
        {"infinities and NaN are seen", tells_what_is_not_finite},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

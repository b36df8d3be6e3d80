/* test_select.c - what is sent of a tensor: exactly the largest units of each chunk, by
 * every kernel set alike, and the rest stays.
 */
#include <math.h>

#include "../../csrc/sparse/payload.h"
#include "check.h"
#include "sparse_values.h"

static const size_t counts[] = {1, 15, 16, 17, 1008, 4095, 4096, 4097, 9000, 70001};

/* Of a unit: a plain element, or the sum of magnitudes of 16, halves folded onto each other. */
static float score_of(const float *c, size_t elems, size_t unit, size_t block)
{
    if (block == 1)
        return c[unit];
    float sums[16] = {0};
    for (size_t i = 0; i < 16 && unit * 16 + i < elems; i++)
        sums[i] = fabsf(c[unit * 16 + i]);
    for (size_t half = 8; half > 0; half /= 2)
        for (size_t i = 0; i < half; i++)
            sums[i] += sums[i + half];
    return sums[0];
}

/* Whether a unit is among the k largest: few are larger, or equal and before it. */
static int is_chosen(const float *scores, size_t units, size_t unit, size_t k)
{
    size_t before = 0;
    for (size_t i = 0; i < units; i++) {
        uint32_t other = sparse_size_of(scores[i]), own = sparse_size_of(scores[unit]);
        before += other > own || (other == own && i < unit);
    }
    return before < k;
}

/* The record of one chunk against c; advances *wire. */
static void check_record(const rc_sparse_format *f, const float *c, const float *left, size_t elems,
                         const uint8_t **wire)
{
    sparse_chunk chunk = sparse_chunk_at(f, elems, 0);
    static uint16_t index[65536], half[65536];
    static float values[65536], scores[65536];
    const uint8_t *at = sparse_get_indices(f, &chunk, *wire, index);
    if (!CHECK(at != NULL))
        return;
    sparse_get_values(f, kernels_at(0), at, values, half, chunk.kept * f->block);
    for (size_t i = 0; i < chunk.units; i++)
        scores[i] = score_of(c, elems, i, f->block);
    size_t kept = 0;
    for (size_t unit = 0; unit < chunk.units; unit++) {
        int sent = kept < chunk.kept && index[kept] == unit;
        if (unit % 17 == 0 || sent)
            CHECK_EQ(sent, is_chosen(scores, chunk.units, unit, chunk.kept));
        for (size_t e = unit * f->block; e < (unit + 1) * f->block && e < elems; e++) {
            float value = sent ? values[kept * f->block + e % f->block] : 0.0F;
            CHECK(left[e] == c[e] - value);
            CHECK(!sent || fabsf(left[e]) <= fabsf(c[e]) * 0x1p-8F + 0x1p-133F);
        }
        kept += (size_t)sent;
    }
    CHECK_EQ(kept, chunk.kept);
    *wire += chunk.bytes;
}

static void select_once(const rc_sparse_format *f, size_t count)
{
    float *delta = sparse_fill(count), *residual = sparse_fill(count), *c = sparse_fill(count);
    uint64_t bytes = rc_sparse_bytes(f, count);
    uint8_t *first = calloc(1, bytes + 1), *wire = calloc(1, bytes + 1);
    float *left = sparse_fill(count), *kept = sparse_fill(count);
    int at = 0, poisoned = 7;
    for (size_t i = 0; i < count; i++)
        c[i] = residual[i] * 0.9F + delta[i];
    for (const char *set = sparse_set(&at); set != NULL; set = sparse_set(&at)) {
        wire[bytes] = 0xab;
        CHECK_EQ(rc_sparse_select(f, set, wire, left, residual, delta, 0.9F, count, &poisoned), 0);
        CHECK_EQ(poisoned, 0);
        CHECK_EQ(wire[bytes], 0xab);
        if (at == 1) {
            memcpy(first, wire, bytes);
            memcpy(kept, left, count * sizeof *left);
        }
        CHECK(memcmp(first, wire, bytes) == 0);
        CHECK(memcmp(kept, left, count * sizeof *left) == 0);
    }
    const uint8_t *record = first;
    for (size_t start = 0; start < count; start += f->chunk)
        check_record(f, c + start, left + start,
                     count - start < f->chunk ? count - start : f->chunk, &record);
    CHECK_EQ((size_t)(record - first), bytes);
    free(delta), free(residual), free(c), free(first), free(wire), free(left), free(kept);
}

static void chooses_the_largest(void)
{
    for (size_t f = 0; f < CHECK_COUNT(sparse_formats); f++)
        for (size_t i = 0; i < CHECK_COUNT(counts); i++)
            if (counts[i] < 70000 || sparse_formats[f].block == 16)
                select_once(&sparse_formats[f], counts[i]);
}

static void says_what_is_not_finite(void)
{
    const rc_sparse_format f = {4096, 1, 4, RC_BF16};
    float x[100] = {0}, left[100];
    uint8_t wire[200];
    int poisoned = 0;
    static const float wrong[] = {INFINITY, -INFINITY, NAN, 0x1.ffp127F}; /* rounds to infinity */
    for (size_t i = 0; i < CHECK_COUNT(wrong); i++) {
        x[63] = wrong[i];
        CHECK_EQ(rc_sparse_select(&f, NULL, wire, left, NULL, x, 1.0F, 100, &poisoned), RC_OK);
        CHECK_EQ(poisoned, 1);
    }
}

int main(void)
{
    const check_test tests[] = {
        {"exactly the largest of each chunk, with every kernel set", chooses_the_largest},
        {"what is not finite is told", says_what_is_not_finite},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

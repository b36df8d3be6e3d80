/* test_quant.c - segments of few bits per element in any kernel set: the bits of the portable one,
 * which tests/test_kernels.py holds to the formulas, as it does sums; sizes; and what is finite.
 */
#include "../../csrc/codec/codec.h"
#include "../../csrc/plan/plan.h"
#include "check.h"
#include "draw.h"

enum { MOST_ELEMS = 3000, ROOM = 4 * MOST_ELEMS };

static const rc_codec codecs[] = {RC_CODEC_INT8, RC_CODEC_INT4, RC_CODEC_ONEBIT, RC_CODEC_FP8,
                                  RC_CODEC_INT2};
static const size_t counts[] = {0, 1, 31, 64, 65, 255, 256, 257, 1023, 1024, 1025, MOST_ELEMS};
static uint64_t seed = 2463534242u;

static void each_kind(void (*run)(const kernel_set *kernels, rc_codec codec, size_t n))
{
    for (int set = 0; kernels_at(set) != NULL; set++)
        for (size_t c = 0; c < CHECK_COUNT(codecs) && kernels_at(set)->supported(); c++)
            for (size_t k = 0; k < CHECK_COUNT(counts); k++)
                run(kernels_at(set), codecs[c], counts[k]);
}

static quant quant_of(const kernel_set *kernels, rc_codec codec, rc_dtype dtype, rc_op op,
                      uint64_t count)
{
    rc_call call = {.codec = codec, .dtype = dtype, .op = op, .count = count};
    quant q;
    quant_init(&q, kernels, &call, 3);
    return q;
}

/* ---- segments ---- */

/* What a residual is added to, all that comes of it, and nothing beyond its end. */
static void one_segment(const kernel_set *kernels, rc_codec codec, size_t n)
{
    static float x[MOST_ELEMS], residual[MOST_ELEMS];
    static float left[MOST_ELEMS], want_left[MOST_ELEMS], got[MOST_ELEMS], want[MOST_ELEMS];
    static uint8_t wire[ROOM + 1], want_wire[ROOM];
    quant q = quant_of(kernels, codec, RC_F32, RC_SUM, n);
    quant portable = quant_of(kernels_at(0), codec, RC_F32, RC_SUM, n);
    size_t bytes = quant_bytes(&q, n);
    int poisoned = 0;
    fill_random(x, RC_F32, n, &seed);
    fill_random(residual, RC_F32, n, &seed);
    wire[bytes] = 0x5a;
    quant_encode(&q, wire, x, residual, left, n, &poisoned);
    quant_store(&q, got, wire, n, &poisoned);
    quant_encode(&portable, want_wire, x, residual, want_left, n, &poisoned);
    quant_store(&portable, want, want_wire, n, &poisoned);
    CHECK_EQ(wire[bytes], 0x5a);
    CHECK(memcmp(wire, want_wire, bytes) == 0);
    CHECK(memcmp(left, want_left, n * sizeof *left) == 0);
    CHECK(memcmp(got, want, n * sizeof *got) == 0);
    for (size_t i = 0; i < n; i++)
        CHECK(left[i] == x[i] + residual[i] - got[i]);
    CHECK_EQ(poisoned, 0);
}

static void segments_are_the_portable_ones(void)
{
    each_kind(one_segment);
}

/* ---- sums ---- */

/* Without the sum, where scales are small; bytes may be any that come from a wire. */
static void one_large_sum(const kernel_set *kernels, rc_codec codec, size_t n)
{
    static float got[MOST_ELEMS];
    static uint8_t wire[2][ROOM];
    const void *both[] = {wire[0], wire[1]};
    const quant_terms terms = {.wires = both, .count = 2};
    quant q = quant_of(kernels, codec, RC_F32, RC_AVG, n);
    for (int rank = 0; rank < 2; rank++)
        for (size_t i = 0; i < quant_bytes(&q, n); i++)
            wire[rank][i] = (uint8_t)draw_below(&seed, 256);
    for (uint16_t scale = 0x7000; scale <= 0x7fc0 && n > 0; scale += 0x20) {
        int want = 0;
        for (int rank = 0; rank < 2; rank++) {
            uint16_t *scales = (uint16_t *)(void *)wire[rank];
            size_t count = kernel_block_scales(q.format, n);
            for (size_t i = 0; i < count; i++)
                scales[i] = 0x3f80;
            scales[draw_below(&seed, count)] = (uint16_t)(scale | draw_below(&seed, 2) << 15);
        }
        quant_join(&q, got, &terms, n, &want);
        CHECK_EQ(quant_sum_is_poisoned(&q, &terms, n), want);
    }
}

static void a_sum_that_is_too_large_is_found(void)
{
    each_kind(one_large_sum);
}

/* ---- sizes ---- */

static void segments_fit(void)
{
    for (size_t c = 0; c < CHECK_COUNT(codecs); c++)
        for (size_t bytes = 4096; bytes <= 4 << 20; bytes *= 2) {
            quant q = quant_of(kernels_find(NULL), codecs[c], RC_F32, RC_SUM, 1);
            size_t n = quant_segment(&q, bytes);
            CHECK(n > 0 && n % PLAN_ALIGN == 0);
            CHECK(quant_bytes(&q, n) <= bytes);
            CHECK(quant_bytes(&q, n + PLAN_ALIGN) > bytes);
        }
}

static void finite_is_told_from_not(void)
{
    float few[5] = {0.0F, -1.0F, 3e38F, 1e-40F, -0.0F};
    double many[5] = {0.0, -1.0, 3e38, 1e300, -0.0};
    CHECK(quant_is_finite(RC_F32, few, 5) && quant_is_finite(RC_F64, many, 5));
    few[3] = -INFINITY;
    many[4] = (double)NAN;
    CHECK(!quant_is_finite(RC_F32, few, 5) && !quant_is_finite(RC_F64, many, 5));
    CHECK(quant_is_finite(RC_F32, few, 3) && quant_is_finite(RC_F64, many, 4));
    quant_fill_nan(RC_F32, few, 4);
    quant_fill_nan(RC_F64, many, 4);
    CHECK(isnan(few[0]) && isnan(few[3]) && few[4] == 0.0F);
    CHECK(isnan(many[0]) && isnan(many[3]));
}

int main(void)
{
    static const check_test tests[] = {
        {"segments_are_the_portable_ones", segments_are_the_portable_ones},
        {"a_sum_that_is_too_large_is_found", a_sum_that_is_too_large_is_found},
        {"segments_fit", segments_fit},
        {"finite_is_told_from_not", finite_is_told_from_not},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

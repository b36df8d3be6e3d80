/* test_quant.c - segments of few bits per element: the payload read by its specification, its size,
 * and sums and results in any kernel set.
 */
#include "../../csrc/codec/quant.h"
#include "../../csrc/plan/plan.h"
#include "check.h"
#include "quant_reference.h"

enum { MOST_ELEMS = 3000, ROOM = 4 * MOST_ELEMS };

static const rc_codec codecs[] = {RC_CODEC_INT8, RC_CODEC_INT4, RC_CODEC_ONEBIT, RC_CODEC_FP8};
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

/* ---- the payload, by docs/WIRE.md ---- */

static size_t scales_of(rc_codec codec, size_t n)
{
    return (n + qref_block(codec) - 1) / qref_block(codec);
}

static size_t bytes_of(rc_codec codec, size_t n)
{
    size_t codes = n;
    if (codec == RC_CODEC_INT4 || codec == RC_CODEC_ONEBIT)
        codes = 32 * scales_of(codec, n);
    return 2 * scales_of(codec, n) + codes;
}

static float element_of(rc_codec codec, const uint8_t *wire, size_t n, size_t i)
{
    size_t block = i / qref_block(codec), within = i % qref_block(codec);
    const uint8_t *codes = wire + 2 * scales_of(codec, n);
    float s = qref_float((uint32_t)(wire[2 * block] | wire[2 * block + 1] << 8) << 16);
    int code;
    switch (codec) {
    case RC_CODEC_INT8: return (float)(int8_t)codes[i] * s;
    case RC_CODEC_INT4:
        code = codes[32 * block + within % 32] >> (within < 32 ? 0 : 4) & 15;
        return (float)(code < 8 ? code : code - 16) * s;
    case RC_CODEC_ONEBIT:
        code = codes[32 * block + within / 8] >> within % 8 & 1;
        return s == 0.0F ? 0.0F : code ? s : -s;
    default: break;
    }
    int exponent = codes[i] >> 3 & 15, fraction = codes[i] & 7;
    double value = exponent == 0 ? ldexp(fraction, -9) : ldexp(8 + fraction, exponent - 10);
    return (float)(codes[i] & 128 ? -value : value) * s;
}

static void one_payload(const kernel_set *kernels, rc_codec codec, size_t n)
{
    static float x[MOST_ELEMS], residual[MOST_ELEMS], c[MOST_ELEMS], d[MOST_ELEMS];
    static float left[MOST_ELEMS], want[MOST_ELEMS], got[MOST_ELEMS];
    static uint8_t wire[ROOM + 1];
    quant q = quant_of(kernels, codec, RC_F32, RC_SUM, n);
    int poisoned = 0;
    fill_random(x, RC_F32, n, &seed);
    fill_random(residual, RC_F32, n, &seed);
    for (size_t i = 0; i < n; i++)
        c[i] = x[i] + residual[i];
    qref_round(codec, d, want, c, n);
    wire[bytes_of(codec, n)] = 0x5a;
    quant_encode(&q, wire, x, residual, left, n, &poisoned);
    CHECK_EQ(wire[bytes_of(codec, n)], 0x5a);
    CHECK_EQ(quant_bytes(&q, n), bytes_of(codec, n));
    for (size_t i = 0; i < n; i++)
        CHECK(element_of(codec, wire, n, i) == d[i]);
    CHECK(memcmp(left, want, n * sizeof *left) == 0);
    quant_store(&q, got, wire, n, &poisoned);
    CHECK(memcmp(got, d, n * sizeof *got) == 0);
    CHECK_EQ(poisoned, 0);
}

static void payloads_are_as_specified(void)
{
    each_kind(one_payload);
}

/* ---- sums ---- */

enum { RANKS = 3, OWN = 1 };

/* Three contributions, the second one this rank's own and exact; result and residual of the owner.
 */
static void one_join(const kernel_set *kernels, rc_codec codec, size_t n)
{
    static float x[RANKS][MOST_ELEMS], d[RANKS][MOST_ELEMS], e[MOST_ELEMS], own[MOST_ELEMS];
    static float sum[MOST_ELEMS], t[MOST_ELEMS], want[MOST_ELEMS], want_left[MOST_ELEMS];
    static float plain[MOST_ELEMS], got[MOST_ELEMS], left[MOST_ELEMS];
    static uint8_t wire[RANKS][ROOM], out[ROOM];
    const void *wires[RANKS] = {wire[0], NULL, wire[2]};
    quant q = quant_of(kernels, codec, RC_F32, RC_AVG, n);
    int poisoned = 0;
    fill_random(e, RC_F32, n, &seed);
    fill_random(own, RC_F32, n, &seed);
    for (int rank = 0; rank < RANKS; rank++) {
        fill_random(x[rank], RC_F32, n, &seed);
        quant_encode(&q, wire[rank], x[rank], NULL, NULL, n, &poisoned);
        qref_round(codec, d[rank], NULL, x[rank], n);
    }
    for (size_t i = 0; i < n; i++) {
        sum[i] = d[0][i] + (x[OWN][i] + own[i]);
        sum[i] = (sum[i] + d[2][i]) * (1.0F / 3.0F);
        t[i] = sum[i] + e[i];
    }
    qref_round(codec, want, want_left, t, n);
    quant_terms terms = {.wires = wires, .count = RANKS, .src = x[OWN], .residual = own};
    quant_join(&q, plain, &terms, n, &poisoned);
    CHECK(memcmp(plain, sum, n * sizeof *sum) == 0);
    quant_join_encoded(&q, got, out, &terms, e, left, n, &poisoned);
    CHECK(memcmp(got, want, n * sizeof *want) == 0);
    CHECK(memcmp(left, want_left, n * sizeof *left) == 0);
    for (size_t i = 0; i < n; i++)
        CHECK(element_of(codec, out, n, i) == want[i]);
    CHECK_EQ(poisoned, 0);
}

static void joins_are_in_order_of_rank(void)
{
    each_kind(one_join);
}

/* Whoever encodes, decodes or adds a NaN or an infinity is told. */
static void one_poison(const kernel_set *kernels, rc_codec codec, size_t n)
{
    static float x[MOST_ELEMS], got[MOST_ELEMS];
    static double wide[MOST_ELEMS];
    static uint8_t wire[ROOM], other[ROOM], out[ROOM];
    quant q = quant_of(kernels, codec, RC_F32, RC_SUM, n);
    int fine = 0, encoded = 0, decoded = 0, joined = 0, sent = 0, stored = 0;
    if (n == 0)
        return;
    fill_random(x, RC_F32, n, &seed);
    quant_encode(&q, other, x, NULL, NULL, n, &fine);
    x[draw_below(&seed, n)] = draw_below(&seed, 2) ? NAN : -INFINITY;
    quant_encode(&q, wire, x, NULL, NULL, n, &encoded);
    quant_store(&q, got, wire, n, &decoded);
    const void *both[] = {other, wire}, *own[] = {other, NULL};
    quant_terms terms = {.wires = both, .count = 2}, exact = {.wires = own, .count = 2, .src = x};
    quant_join(&q, got, &terms, n, &joined);
    quant_join_encoded(&q, got, out, &exact, NULL, NULL, n, &sent);
    q = quant_of(kernels, codec, RC_F64, RC_SUM, n);
    quant_store(&q, wide, out, n, &stored);
    CHECK(!fine && encoded && decoded && joined && sent && stored);
}

static void poison_is_told(void)
{
    each_kind(one_poison);
}

/* Without the sum, where scales are small; bytes may be any that come from a wire. */
static void one_large_sum(const kernel_set *kernels, rc_codec codec, size_t n)
{
    static float got[MOST_ELEMS];
    static uint8_t wire[2][ROOM];
    const void *both[] = {wire[0], wire[1]};
    const quant_terms terms = {.wires = both, .count = 2};
    quant q = quant_of(kernels, codec, RC_F32, RC_AVG, n);
    for (int rank = 0; rank < 2; rank++)
        for (size_t i = 0; i < bytes_of(codec, n); i++)
            wire[rank][i] = (uint8_t)draw_below(&seed, 256);
    for (uint16_t scale = 0x7000; scale <= 0x7fc0 && n > 0; scale += 0x20) {
        int want = 0;
        for (int rank = 0; rank < 2; rank++) {
            uint16_t *scales = (uint16_t *)(void *)wire[rank];
            for (size_t i = 0; i < scales_of(codec, n); i++)
                scales[i] = 0x3f80;
            scales[draw_below(&seed, scales_of(codec, n))] =
                (uint16_t)(scale | draw_below(&seed, 2) << 15);
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
            CHECK(bytes_of(codecs[c], n) <= bytes);
            CHECK(bytes_of(codecs[c], n + PLAN_ALIGN) > bytes);
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
        {"payloads_are_as_specified", payloads_are_as_specified},
        {"joins_are_in_order_of_rank", joins_are_in_order_of_rank},
        {"poison_is_told", poison_is_told},
        {"a_sum_that_is_too_large_is_found", a_sum_that_is_too_large_is_found},
        {"segments_fit", segments_fit},
        {"finite_is_told_from_not", finite_is_told_from_not},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

/* test_block_rules.c - formats whose elements share a scale: what their formulas promise, checked
 * without them, in every kernel set. No code beyond its limit, no error beyond half a step, no
 * smaller scale that would do, no NaN where there was none; and encodings made by hand.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "../../csrc/kernels/kernels.h"
#include "block_values.h"
#include "check.h"
#include "operands.h"

/* ---- what the formulas promise ---- */

typedef struct encoded {
    uint16_t scales[16];
    uint8_t codes[1024];
    float left[1024], d[1024];
} encoded;

static int encode_and_decode(const kernel_set *set, enum format format, encoded *out,
                             const float *c, size_t n)
{
    const kernel_block *block = format_of(set, format);
    const int poisoned = block->encode(out->scales, out->codes, out->left, c, 1.0f, NULL, n, 0);
    CHECK_EQ(block->decode(out->d, out->scales, out->codes, n, 0), poisoned);
    return poisoned;
}

static double top_of(const float *c, size_t n)
{
    double top = 0;
    for (size_t i = 0; i < n; i++)
        top = fmax(top, fabs((double)c[i]));
    return top;
}

/* A block: no element is wrong by more than half a step (a sixteenth of itself in e4m3, or half of
 * the smallest number), the largest is within reach of its code, and of no smaller scale's. */
static void promise_block(enum format format, const float *c, const float *left, uint16_t scale,
                          size_t n)
{
    const double s = bf16_value(scale);
    const double top = top_of(c, n);
    const double limit = limit_of[format];
    const double slack = 1 + 0x1p-21;
    if (s == 0) {
        CHECK(top / limit <= (double)FLT_MIN * slack);
        for (size_t i = 0; i < n; i++)
            CHECK(bits_of(left[i]) == bits_of(c[i]));
        return;
    }
    CHECK(top <= limit * s * slack);
    CHECK(top * slack > limit * bf16_value((uint16_t)(scale - 1)) || scale == 0x80);
    for (size_t i = 0; i < n; i++) {
        const double size = fabs((double)c[i]);
        const double step = format == FP8 ? fmax(size / 8, s * 0x1p-9) : s;
        if (!CHECK(fabs((double)left[i]) <= step / 2 * slack))
            CHECK_NOTE("  %s c %g left %g s %g\n", format_names[format], (double)c[i],
                       (double)left[i], s);
    }
}

static void promise_set(const kernel_set *set)
{
    enum { N = 768 };
    for (enum format format = INT8; format < FORMATS; format++)
        for (size_t t = 0; format != ONEBIT && t < 300; t++) {
            static const enum values kinds[] = {ORDINARY, SPARSE, TINY, SMALL, ANY, TIES, EDGES};
            const size_t n = N - t % 5 * 77;
            float c[N];
            encoded out;
            fill_values(c, format, kinds[t % CHECK_COUNT(kinds)], n);
            if (encode_and_decode(set, format, &out, c, n))
                continue;
            for (size_t at = 0; at < n; at += block_of[format]) {
                const size_t count = n - at < block_of[format] ? n - at : block_of[format];
                promise_block(format, c + at, out.left + at, out.scales[at / block_of[format]],
                              count);
            }
            for (size_t i = 0; i < n; i++) {
                const double s = bf16_value(out.scales[i / block_of[format]]);
                CHECK(fabs((double)out.d[i]) <= limit_of[format] * s);
                CHECK((double)out.left[i] == (double)(float)((double)c[i] - (double)out.d[i]));
            }
        }
}

static void promises(void)
{
    each_set(promise_set);
}

/* The scale of onebit is within a rounding of the smaller mean, in double and in any order. */
static void mean_set(const kernel_set *set)
{
    for (size_t t = 0; t < 300; t++) {
        static const enum values kinds[] = {ORDINARY, SPARSE, TIES};
        const size_t n = 1 + random_bits() % 256;
        float c[256];
        encoded out;
        double squares = 0, sizes = 0;
        fill_values(c, ONEBIT, kinds[t % CHECK_COUNT(kinds)], n);
        for (size_t i = 0; i < n; i++) {
            squares += (double)c[i] * (double)c[i];
            sizes += fabs((double)c[i]);
        }
        CHECK_EQ(encode_and_decode(set, ONEBIT, &out, c, n), 0);
        const double want = fmin(sqrt(squares / (double)n), 1.75 * sizes / (double)n);
        const double s = bf16_value(out.scales[0]);
        CHECK(fabs(s - want) <= want * (0x1p-8 + 0x1p-18));
        for (size_t i = 0; i < n; i++) {
            CHECK((double)out.d[i] == (c[i] >= 0 ? s : -s));
            CHECK(!signbit(out.d[i]) == (s == 0 || c[i] >= 0));
            CHECK(out.left[i] == c[i] - out.d[i]);
        }
    }
}

static void means(void)
{
    each_set(mean_set);
}

/* With feedback, what was sent and what is left add up to what was put in, however harsh the
 * format. */
static void telescope_set(const kernel_set *set)
{
    enum { N = 500, STEPS = 50 };
    for (enum format format = INT8; format < FORMATS; format++) {
        const kernel_block *block = format_of(set, format);
        static float src[N], a[N], b[N], sent[N];
        double put[N] = {0};
        encoded out;
        memset(a, 0, sizeof a);
        memset(sent, 0, sizeof sent);
        for (int step = 0; step < STEPS; step++) {
            float *old = step % 2 ? b : a, *new = step % 2 ? a : b;
            fill_values(src, format, ORDINARY, N);
            for (size_t i = 0; i < N; i++)
                put[i] += (double)src[i];
            CHECK_EQ(block->encode(out.scales, out.codes, new, src, 1.0f, old, N, 1), 0);
            CHECK_EQ(block->add(sent, out.scales, out.codes, N), 0);
        }
        for (size_t i = 0; i < N; i++) {
            const double got = (double)sent[i] + (double)(STEPS % 2 ? b : a)[i];
            CHECK(fabs(got - put[i]) < 1e-4);
        }
    }
}

static void telescope(void)
{
    each_set(telescope_set);
}

/* ---- by hand ---- */

/* 1 / 127 is 0x3c010204 as a float, so that its scale is 0x3c02 and 1.0 becomes 126.03; 1 / 7 is
 * 0x3e124925 and 1 / 448 0x3b124925. 127, 7 and 448 need no rounding: their scale is 1. */
static void scales_set(const kernel_set *set)
{
    static const struct {
        enum format format;
        float top;
        uint16_t scale;
        int code;
    } cases[] = {
        {INT8, 1.0f, 0x3c02, 126},   {INT8, 127.0f, 0x3f80, 127},  {INT8, -127.0f, 0x3f80, -127},
        {INT8, 127.1f, 0x3f81, 126}, {INT8, 126.99f, 0x3f80, 127}, {INT4, 1.0f, 0x3e13, 7},
        {INT4, -7.0f, 0x3f80, -7},   {INT4, 7.0001f, 0x3f81, 7},   {FP8, 448.0f, 0x3f80, 0x7e},
        {FP8, 1.0f, 0x3b13, 0x7e},   {FP8, -448.0f, 0x3f80, 0xfe}, {ONEBIT, 4.0f, 0x3e60, 1},
        {ONEBIT, -4.0f, 0x3e60, 0},
    };
    for (size_t t = 0; t < CHECK_COUNT(cases); t++) {
        float c[32] = {0};
        encoded out;
        c[3] = cases[t].top;
        CHECK_EQ(encode_and_decode(set, cases[t].format, &out, c, 32), 0);
        if (!CHECK_EQ(out.scales[0], cases[t].scale))
            CHECK_NOTE("  %s %g\n", format_names[cases[t].format], (double)cases[t].top);
        const int code = cases[t].format == ONEBIT ? out.codes[0] >> 3 & 1
                         : cases[t].format == FP8  ? out.codes[3]
                         : cases[t].format == INT8 ? (int8_t)out.codes[3]
                                                   : (int8_t)(uint8_t)(out.codes[3] << 4) / 16;
        CHECK_EQ(code, cases[t].code);
    }
}

/* Where elements lie in the bytes, and that what is beyond the last is zero. */
static void layout_set(const kernel_set *set)
{
    float c[70];
    encoded out;
    for (int i = 0; i < 70; i++)
        c[i] = (float)(i % 8 == 0 ? 7 : i % 2 ? -3 : 1);
    memset(&out, GUARD_BYTE, sizeof out);
    encode_and_decode(set, INT4, &out, c, 70);
    CHECK_EQ(out.scales[0], 0x3f80);
    CHECK_EQ(out.codes[0], 0x77);
    CHECK_EQ(out.codes[1], 0xdd);
    CHECK_EQ(out.codes[2], 0x11);
    CHECK_EQ(out.codes[32], 0x07);
    CHECK_EQ(out.codes[33], 0x0d);
    CHECK_EQ(out.codes[38], 0);
    CHECK_EQ(out.codes[63], 0);
    CHECK_EQ(out.codes[64], GUARD_BYTE);
    memset(&out, GUARD_BYTE, sizeof out);
    c[2] = -0.0f;
    encode_and_decode(set, ONEBIT, &out, c, 70);
    CHECK_EQ(out.codes[0], 0x55);
    CHECK_EQ(out.codes[8], 0x15);
    CHECK_EQ(out.codes[9], 0);
    CHECK_EQ(out.codes[31], 0);
    CHECK_EQ(out.codes[32], GUARD_BYTE);
}

/* e4m3 with a scale of 1: ties to even, subnormals, zeros of both signs. */
static void e4m3_set(const kernel_set *set)
{
    static const struct {
        float c;
        uint8_t code;
    } cases[] = {
        {448.0f, 0x7e},    {1.0f, 0x38},      {-1.0f, 0xb8},     {1.0625f, 0x38},
        {1.1875f, 0x3a},   {0x1p-6f, 0x08},   {0x1p-9f, 0x01},   {0x1p-10f, 0x00},
        {0x1.8p-9f, 0x02}, {0x1.4p-8f, 0x02}, {-0x1p-10f, 0x80}, {0x1.000002p-10f, 0x01},
        {0x1.ep-7f, 0x08}, {432.0f, 0x7e},    {431.0f, 0x7d},    {-0.0f, 0x80},
    };
    float c[CHECK_COUNT(cases)];
    encoded out;
    for (size_t i = 0; i < CHECK_COUNT(cases); i++)
        c[i] = cases[i].c;
    encode_and_decode(set, FP8, &out, c, CHECK_COUNT(cases));
    CHECK_EQ(out.scales[0], 0x3f80);
    for (size_t i = 0; i < CHECK_COUNT(cases); i++)
        if (!CHECK_EQ(out.codes[i], cases[i].code))
            CHECK_NOTE("  %s: e4m3 of %g\n", set->name, (double)cases[i].c);
}

static void by_hand(void)
{
    each_set(scales_set);
    each_set(layout_set);
    each_set(e4m3_set);
}

/* Blocks that cannot be encoded: theirs alone are NaN, and whatever is not poisoned is finite. */
static void poison_set(const kernel_set *set)
{
    static const float bad[] = {INFINITY, -INFINITY, NAN, FLT_MAX, -FLT_MAX, 1.9e19f};
    for (enum format format = INT8; format < FORMATS; format++)
        for (size_t b = 0; b < CHECK_COUNT(bad); b++) {
            enum { N = 1000 };
            const size_t at = 256 + b * 37;
            float c[N], acc[N];
            encoded out;
            fill_values(c, format, ORDINARY, N);
            c[at] = bad[b];
            const int hurts = b != 5 || format == ONEBIT;
            memcpy(acc, c, sizeof acc);
            CHECK_EQ(encode_and_decode(set, format, &out, c, N), hurts);
            CHECK_EQ(format_of(set, format)->add(acc, out.scales, out.codes, N), hurts);
            for (size_t i = 0; i < N; i++) {
                const int hurt = hurts && i / block_of[format] == at / block_of[format];
                CHECK(hurt ? bits_of(out.d[i]) == 0x7fc00000 : isfinite(out.d[i]));
                CHECK(hurt ? bits_of(out.left[i]) == 0x7fc00000 : isfinite(out.left[i]));
                CHECK(hurt ? bits_of(acc[i]) == 0x7fc00000 : isfinite(acc[i]));
            }
        }
}

static void poison(void)
{
    each_set(poison_set);
}

int main(void)
{
    static const check_test tests[] = {
        {"by_hand", by_hand},     {"promises", promises}, {"means", means},
        {"telescope", telescope}, {"poison", poison},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

/* test_block.c - formats whose elements share a scale, in every kernel set.
 *
 * Every set must give the bits of block_reference.h, for all sizes, offsets, aliases and classes of
 * values; and what is encoded must have the properties that the formulas promise, which are checked
 * without them: no code beyond its limit, no error beyond half a step, no smaller scale that would
 * do.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "../../csrc/kernels/kernels.h"
#include "block_reference.h"
#include "check.h"
#include "operands.h"

/* ---- operands ---- */

enum values {
    ORDINARY,
    SPARSE,
    ZEROS,
    TINY,   /* subnormal, or with a scale that is or nearly is */
    SMALL,  /* with squares that are subnormal */
    HUGE,   /* up to the largest float, with sums of squares that overflow */
    ANY,    /* of all exponents */
    TIES,   /* halves of a power of two, the largest being the limit itself */
    EDGES,  /* the largest next to limit times a bf16 */
    BROKEN, /* a few infinities and NaNs */
    VALUES
};

static float random_float(int low, int high)
{
    const uint64_t bits = random_bits();
    const uint32_t exponent = (uint32_t)low + (uint32_t)(bits >> 32) % (uint32_t)(high - low + 1);
    return float_of(exponent << 23 | ((uint32_t)bits & 0x807fffff));
}

static float next_to(float x, int ulps)
{
    return float_of(bits_of(x) + (uint32_t)ulps);
}

static float value_of(enum values values, double limit)
{
    static const float broken[] = {INFINITY, -INFINITY, NAN};
    const unsigned pick = (unsigned)(random_bits() >> 40);
    const double sign = pick & 1 ? -1 : 1;
    switch (values) {
    case SPARSE: return pick % 10 ? 0.0f : random_float(120, 130);
    case ZEROS: return pick & 1 ? -0.0f : 0.0f;
    case TINY: return random_float(0, pick % 8 ? 6 : 12);
    case SMALL: return random_float(50, 70);
    case HUGE: return random_float(pick % 16 ? 180 : 250, pick % 16 ? 190 : 254);
    case ANY: return random_float(0, 254);
    case TIES:
        return (float)(sign * ((pick >> 1) % (2 * (unsigned)limit) / 2.0 + (pick % 64 == 0)));
    case BROKEN: return pick % 200 ? random_float(100, 130) : broken[pick / 200 % 3];
    default: return (float)((double)(int64_t)random_bits() * 0x1p-62);
    }
}

/* Blocks of one class each, unless it is BROKEN, whose blocks may be whole. */
static void fill_values(float *x, enum format format, enum values values, size_t n)
{
    const double limit = limit_of[format];
    for (size_t i = 0; i < n; i++)
        x[i] = value_of(values, limit);
    if (values == EDGES)
        for (size_t i = 0; i < n; i++) {
            const float s = float_of((uint32_t)(bits_of(random_float(60, 190)) & 0x7fff0000));
            const int at_top = i % block_of[format] == 0;
            x[i] = at_top ? next_to((float)limit * s, (int)(random_bits() >> 40) % 5 - 2) : 0.0f;
        }
}

/* ---- encoding ---- */

typedef struct encoding {
    enum format format;
    enum values values;
    size_t n;
    size_t offset;
    float pre;
    int with_residual, far;
    enum { NO_LEFT, OWN_LEFT, LEFT_IS_RESIDUAL, LEFT_IS_SRC } left;
} encoding;

static void note(const char *set, const encoding *e)
{
    CHECK_NOTE("  set %s %s values %d n %zu offset %zu pre %g residual %d left %d far %d\n", set,
               format_names[e->format], (int)e->values, e->n, e->offset, (double)e->pre,
               e->with_residual, (int)e->left, e->far);
}

/* What the reference says, and its operands. */
typedef struct expected {
    float *src, *residual, *c, *left;
    uint16_t *scales;
    uint8_t *codes;
    int poisoned;
} expected;

static void expect(expected *want, const encoding *e)
{
    const size_t codes = codes_size(e->format, e->n);
    want->src = make(0, e->n * sizeof(float));
    want->residual = make(0, e->n * sizeof(float));
    want->c = make(0, e->n * sizeof(float));
    want->left = make(0, e->n * sizeof(float));
    want->scales = make(0, scales_count(e->format, e->n) * sizeof(uint16_t));
    want->codes = make(0, codes);
    memset(want->codes, 0, codes);
    fill_values(want->src, e->format, e->values, e->n);
    fill_values(want->residual, e->format, e->values, e->n);
    for (size_t i = 0; i < e->n; i++) {
        const double product = (double)(float)((double)want->src[i] * (double)e->pre);
        want->c[i] = (float)(product + (e->with_residual ? (double)want->residual[i] : -0.0));
    }
    want->poisoned =
        encode_reference(e->format, want->scales, want->codes, want->left, want->c, e->n);
}

static void forget(expected *want)
{
    drop(want->src, 0);
    drop(want->residual, 0);
    drop(want->c, 0);
    drop(want->left, 0);
    drop(want->scales, 0);
    drop(want->codes, 0);
}

static float *copy_of(const float *x, size_t skip, size_t bytes)
{
    float *copy = make(skip, bytes);
    memcpy(copy, x, bytes);
    return copy;
}

static void encode_as(const kernel_set *set, const encoding *e, const expected *want)
{
    const size_t bytes = e->n * sizeof(float);
    const size_t skip = e->offset * sizeof(float);
    const size_t scales_bytes = scales_count(e->format, e->n) * sizeof(uint16_t);
    const size_t codes_bytes = codes_size(e->format, e->n);
    const size_t scales_skip = e->offset % 3 * sizeof(uint16_t);
    float *src = copy_of(want->src, skip, bytes);
    float *residual = copy_of(want->residual, 2 * skip % 32, bytes);
    float *own = make(3 * skip % 64, bytes + GUARD);
    uint16_t *scales = make(scales_skip, scales_bytes + GUARD);
    uint8_t *codes = make(e->offset, codes_bytes + GUARD);
    float *const left = e->left == NO_LEFT            ? NULL
                        : e->left == LEFT_IS_RESIDUAL ? residual
                        : e->left == LEFT_IS_SRC      ? src
                                                      : own;
    const int poisoned = format_of(set, e->format)
                             ->encode(scales, codes, left, src, e->pre,
                                      e->with_residual ? residual : NULL, e->n, e->far);
    int good = CHECK_EQ(poisoned, want->poisoned);
    good &= CHECK(memcmp(scales, want->scales, scales_bytes) == 0);
    good &= CHECK(memcmp(codes, want->codes, codes_bytes) == 0);
    good &= CHECK(!left || memcmp(left, want->left, bytes) == 0);
    good &= CHECK(left == src || memcmp(src, want->src, bytes) == 0);
    good &= CHECK(left == residual || memcmp(residual, want->residual, bytes) == 0);
    good &= CHECK(guard_holds(scales, scales_bytes) && guard_holds(codes, codes_bytes));
    good &= CHECK(guard_holds(own, left == own ? bytes : 0));
    if (!good)
        note(set->name, e);
    drop(src, skip);
    drop(residual, 2 * skip % 32);
    drop(own, 3 * skip % 64);
    drop(scales, scales_skip);
    drop(codes, e->offset);
}

static void encode_case(const encoding *e)
{
    expected want;
    expect(&want, e);
    for (int i = 0; kernels_at(i); i++)
        if (kernels_at(i)->supported())
            encode_as(kernels_at(i), e, &want);
    forget(&want);
}

/* Every size, each with everything else at random. */
static void encodings(void)
{
    static const float pres[] = {1.0f, 1.0f, 0.25f, 1.0f / 3.0f, -1.5f, 1e30f, 1e-30f};
    enum { TRIES = 6 };
    for (enum format format = INT8; format < FORMATS; format++)
        for (size_t n = 0; n <= 600; n++)
            for (size_t t = 0; t < TRIES; t++) {
                const unsigned pick = (unsigned)(random_bits() >> 40);
                encode_case(&(encoding){.format = format,
                                        .values = (n * TRIES + t) % VALUES,
                                        .n = n,
                                        .offset = pick % 16,
                                        .pre = pres[pick / 16 % CHECK_COUNT(pres)],
                                        .with_residual = pick / 256 % 4 != 0,
                                        .far = pick / 1024 % 2 != 0,
                                        .left = pick / 4096 % 4});
            }
}

/* Several blocks of each class, unscaled, with and without a residual. */
static void classes(void)
{
    for (enum format format = INT8; format < FORMATS; format++)
        for (enum values values = ORDINARY; values < VALUES; values++)
            for (int with_residual = 0; with_residual < 2; with_residual++)
                for (size_t t = 0; t < 10; t++)
                    encode_case(&(encoding){.format = format,
                                            .values = values,
                                            .n = 3 * 256 + t % 2 * 100,
                                            .pre = 1.0f,
                                            .with_residual = with_residual,
                                            .far = t % 3 == 0,
                                            .left = OWN_LEFT});
}

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
                const double number =
                    number_at(format, out.codes + i / block_of[format] * bytes_of[format],
                              i % block_of[format]);
                CHECK(fabs(number) <= limit_of[format]);
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

/* ---- decoding of any bytes ---- */

static void decode_case(const kernel_set *set, enum format format, size_t n, size_t offset, int far)
{
    const size_t bytes = n * sizeof(float);
    const size_t skip = offset * sizeof(float);
    const size_t scales_skip = offset % 3 * sizeof(uint16_t);
    const size_t count = scales_count(format, n);
    const kernel_block *block = format_of(set, format);
    uint16_t *scales = make(scales_skip, count * sizeof *scales);
    uint8_t *codes = make(offset, codes_size(format, n));
    float *want = make(0, bytes), *dst = make(skip, bytes + GUARD);
    float *acc = make(skip, bytes + GUARD), *before = make(0, bytes);
    for (size_t i = 0; i < count; i++)
        scales[i] = (uint16_t)(random_bits() >> 40 & (random_bits() >> 63 ? 0x3fff : 0xffff));
    for (size_t i = 0; i < codes_size(format, n); i++)
        codes[i] = (uint8_t)(random_bits() >> 40);
    fill(before, RC_F32, n);
    memcpy(acc, before, bytes);
    const int poisoned = decode_reference(format, want, scales, codes, n);
    int good = CHECK_EQ(block->decode(dst, scales, codes, n, far), poisoned);
    good &= CHECK(memcmp(dst, want, bytes) == 0) & CHECK(guard_holds(dst, bytes));
    good &= CHECK_EQ(block->add(acc, scales, codes, n), poisoned);
    good &= CHECK(guard_holds(acc, bytes));
    for (size_t i = 0; i < n; i++) {
        const float sum = (float)((double)before[i] + (double)want[i]);
        good &= CHECK(isnan(want[i]) ? bits_of(acc[i]) == 0x7fc00000
                      : isnan(sum)   ? isnan(acc[i])
                                     : bits_of(acc[i]) == bits_of(sum));
    }
    if (!good)
        CHECK_NOTE("  set %s %s n %zu offset %zu far %d\n", set->name, format_names[format], n,
                   offset, far);
    drop(scales, scales_skip);
    drop(codes, offset);
    drop(want, 0);
    drop(dst, skip);
    drop(acc, skip);
    drop(before, 0);
}

static void decode_set(const kernel_set *set)
{
    for (enum format format = INT8; format < FORMATS; format++)
        for (size_t n = 0; n <= 600; n++)
            decode_case(set, format, n, n % 13, n % 2 != 0);
}

static void decodings(void)
{
    each_set(decode_set);
}

/* Every code with every exponent of a scale. */
static void every_code_set(const kernel_set *set)
{
    uint8_t codes[256];
    float dst[256], want[256];
    for (size_t i = 0; i < 256; i++)
        codes[i] = (uint8_t)i;
    for (enum format format = INT8; format < FORMATS; format++)
        for (int high = 0; high < 256; high++) {
            uint16_t scales[4];
            for (size_t i = 0; i < 4; i++)
                scales[i] = (uint16_t)((unsigned)high << 8 | (unsigned)(random_bits() >> 56));
            decode_reference(format, want, scales, codes, 256);
            format_of(set, format)->decode(dst, scales, codes, 256, 0);
            CHECK(memcmp(dst, want, sizeof dst) == 0);
        }
}

static void every_code(void)
{
    each_set(every_code_set);
}

static void table(void)
{
    for (int i = 0; kernels_at(i); i++)
        for (enum format format = INT8; format < FORMATS; format++) {
            const kernel_block *block = format_of(kernels_at(i), format);
            CHECK_EQ(block->block, block_of[format]);
            CHECK_EQ(block->bytes, bytes_of[format]);
            for (size_t n = 0; n < 1000; n++) {
                CHECK_EQ(kernel_block_scales(block, n), scales_count(format, n));
                CHECK_EQ(kernel_block_codes(block, n), codes_size(format, n));
            }
        }
}

int main(void)
{
    static const check_test tests[] = {
        {"table", table},         {"by_hand", by_hand},   {"classes", classes},
        {"encodings", encodings}, {"promises", promises}, {"means", means},
        {"telescope", telescope}, {"poison", poison},     {"every_code", every_code},
        {"decodings", decodings},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

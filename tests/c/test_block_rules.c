/* test_block_rules.c - formats whose elements share a scale: encodings made by hand, in every
 * kernel set. That all others are as the formulas say, tests/test_kernels.py shows.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "../../csrc/kernels/kernels.h"
#include "block_values.h"
#include "check.h"
#include "operands.h"

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

int main(void)
{
    static const check_test tests[] = {
        {"by_hand", by_hand},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

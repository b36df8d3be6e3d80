/* test_block.c - formats whose elements share a scale: every kernel set has the bits of the
 * portable one, which tests/test_kernels.py holds to the formulas, for all sizes, offsets, aliases
 * and classes of values, and for any bytes that may come from the wire.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "../../csrc/kernels/kernels.h"
#include "block_values.h"
#include "check.h"
#include "operands.h"

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

/* What the portable set gives where nothing is aliased, and its operands. */
typedef struct expected {
    float *src, *residual, *left;
    uint16_t *scales;
    uint8_t *codes;
    int poisoned;
} expected;

static void expect(expected *want, const encoding *e)
{
    want->src = make(0, e->n * sizeof(float));
    want->residual = make(0, e->n * sizeof(float));
    want->left = make(0, e->n * sizeof(float));
    want->scales = make(0, scales_count(e->format, e->n) * sizeof(uint16_t));
    want->codes = make(0, codes_size(e->format, e->n));
    fill_values(want->src, e->format, e->values, e->n);
    fill_values(want->residual, e->format, e->values, e->n);
    want->poisoned = format_of(kernels_at(0), e->format)
                         ->encode(want->scales, want->codes, want->left, want->src, e->pre,
                                  e->with_residual ? want->residual : NULL, e->n, 0);
}

static void forget(expected *want)
{
    drop(want->src, 0);
    drop(want->residual, 0);
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

/* ---- decoding of any bytes ---- */

/* Of any bits, of ordinary size, or one that an encoder gives meaning to. */
static uint16_t random_scale(void)
{
    static const uint16_t special[] = {0, 0x8000, 1, 0x80, 0x7f80, 0xff80, 0x7fc0, 0xff81};
    const unsigned pick = (unsigned)(random_bits() >> 40);
    if (pick % 3 == 0)
        return special[pick / 3 % CHECK_COUNT(special)];
    return (uint16_t)(random_bits() >> 40 & (pick % 3 == 1 ? 0x3fff : 0xffff));
}

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
        scales[i] = random_scale();
    for (size_t i = 0; i < codes_size(format, n); i++)
        codes[i] = (uint8_t)(random_bits() >> 40);
    fill(before, RC_F32, n);
    memcpy(acc, before, bytes);
    const int poisoned = format_of(kernels_at(0), format)->decode(want, scales, codes, n, 0);
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
static void every_code(void)
{
    uint8_t codes[256];
    float dst[256], want[256];
    for (size_t i = 0; i < 256; i++)
        codes[i] = (uint8_t)i;
    for (int set = 1; kernels_at(set); set++)
        for (enum format format = INT8; kernels_at(set)->supported() && format < FORMATS; format++)
            for (int high = 0; high < 256; high++) {
                uint16_t scales[4];
                for (size_t i = 0; i < 4; i++)
                    scales[i] = (uint16_t)((unsigned)high << 8 | (unsigned)(random_bits() >> 56));
                format_of(kernels_at(0), format)->decode(want, scales, codes, 256, 0);
                format_of(kernels_at(set), format)->decode(dst, scales, codes, 256, 0);
                CHECK(memcmp(dst, want, sizeof dst) == 0);
            }
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
        {"table", table},           {"classes", classes},     {"encodings", encodings},
        {"every_code", every_code}, {"decodings", decodings},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

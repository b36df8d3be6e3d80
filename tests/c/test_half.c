/* test_half.c - bf16 and fp16 in every kernel set.
 *
 * The reference knows only the list of all values that a format has: decoding looks a value up,
 * encoding searches the nearest one. The scalar set must follow it, and every other set that this
 * CPU supports must give the scalar set's bits.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "../../csrc/kernels/kernels.h"
#include "check.h"
#include "operands.h"

/* ---- the reference ---- */

typedef struct format {
    const char *name;
    int exponent_bits, fraction_bits;
    uint16_t infinity, nan;
    double value[0x8000]; /* by magnitude; [infinity] is where the next finite value would be */
} format;

static format formats[] = {
    {.name = "bf16", .exponent_bits = 8, .fraction_bits = 7, .infinity = 0x7f80, .nan = 0x7fc0},
    {.name = "fp16", .exponent_bits = 5, .fraction_bits = 10, .infinity = 0x7c00, .nan = 0x7e00},
};

static const kernel_half *half_of(const kernel_set *set, const format *f)
{
    return f == &formats[0] ? &set->bf16 : &set->fp16;
}

static void list_values(format *f)
{
    const int bias = (1 << (f->exponent_bits - 1)) - 1;
    for (int m = 0; m <= f->infinity; m++) {
        const int exponent = m >> f->fraction_bits;
        const int fraction = m & ((1 << f->fraction_bits) - 1);
        const int whole = exponent ? fraction + (1 << f->fraction_bits) : fraction;
        f->value[m] = ldexp(whole, (exponent ? exponent : 1) - bias - f->fraction_bits);
    }
}

static double decode_reference(const format *f, uint16_t half)
{
    const uint16_t magnitude = half & 0x7fff;
    const double size = magnitude < f->infinity    ? f->value[magnitude]
                        : magnitude == f->infinity ? INFINITY
                                                   : NAN;
    return half & 0x8000 ? -size : size;
}

/* The nearest of all values; of two equally near ones, the one whose last bit is 0. */
static uint16_t encode_reference(const format *f, float x)
{
    static int low = 0; /* from the call before, often still right */
    const double size = fabs((double)x);
    const int sign = signbit(x) ? 0x8000 : 0;
    if (isnan(x))
        return f->nan;
    if (size >= f->value[f->infinity])
        return (uint16_t)(sign | f->infinity);
    if (low >= f->infinity || size < f->value[low] || size >= f->value[low + 1]) {
        int high = f->infinity;
        low = 0;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (f->value[middle] <= size)
                low = middle;
            else
                high = middle;
        }
    }
    const double below = size - f->value[low];
    const double above = f->value[low + 1] - size;
    return (uint16_t)(sign | (low + (below > above || (below == above && low % 2))));
}

/* ---- every value ---- */

static void decode_set(const kernel_set *set)
{
    static uint16_t all[0x10000];
    static float out[0x10000];
    for (size_t i = 0; i < 0x10000; i++)
        all[i] = (uint16_t)i;
    for (const format *f = formats; f < formats + CHECK_COUNT(formats); f++) {
        const int shift = 23 - f->fraction_bits;
        const uint32_t quiet = f->nan == 0x7e00 ? 1u << 22 : 0;
        half_of(set, f)->decode(out, all, 0x10000);
        for (uint32_t i = 0; i < 0x10000; i++) {
            const float want = (float)decode_reference(f, (uint16_t)i);
            const uint32_t nan_want =
                (i & 0x8000) << 16 | 0x7f800000 | quiet | (i & 0x7fff) << shift;
            CHECK_EQ(bits_of(out[i]), isnan(want) ? nan_want : bits_of(want));
        }
    }
}

static void decode_all_patterns(void)
{
    each_set(decode_set);
}

/* Encodes n floats with every set; the scalar one must follow the reference. */
static void encode_block(const format *f, const float *src, uint16_t *got, uint16_t *want, size_t n)
{
    size_t wrong = 0;
    half_of(kernels_at(0), f)->encode(want, src, 1.0f, n);
    for (size_t i = 0; i < n; i++)
        wrong += want[i] != encode_reference(f, src[i]);
    CHECK_EQ(wrong, 0);
    for (int s = 1; kernels_at(s); s++) {
        if (!kernels_at(s)->supported())
            continue;
        half_of(kernels_at(s), f)->encode(got, src, 1.0f, n);
        if (!CHECK(memcmp(got, want, n * sizeof *got) == 0))
            CHECK_NOTE("  set %s format %s\n", kernels_at(s)->name, f->name);
    }
}

enum { BLOCK = 1 << 16 };

/* Every sign and exponent, with every fraction of bf16 and fp16 followed by the lower bits that
 * decide the rounding: none, the least, and half a unit with its neighbours. */
static void encode_every_class(void)
{
    static float src[BLOCK];
    static uint16_t got[BLOCK], want[BLOCK];
    for (uint32_t top = 0; top < 1u << 9; top++) {
        size_t n = 0;
        for (int kept = 7; kept <= 10; kept += 3) {
            const int low = 23 - kept;
            const uint32_t half = 1u << (low - 1);
            const uint32_t rest[] = {0, 1, half - 1, half, half + 1, 2 * half - 1};
            for (uint32_t fraction = 0; fraction < 1u << kept; fraction++)
                for (size_t r = 0; r < CHECK_COUNT(rest); r++)
                    src[n++] = float_of(top << 23 | fraction << low | rest[r]);
        }
        for (const format *f = formats; f < formats + CHECK_COUNT(formats); f++)
            encode_block(f, src, got, want, n);
    }
}

/* ---- every shape ---- */

/* What a value is once it has travelled. */
static float contribution(const format *f, float x)
{
    return (float)decode_reference(f, encode_reference(f, x));
}

static void half_case(const kernel_set *set, const format *f, size_t n, size_t offset, float factor,
                      float post)
{
    const kernel_half *half = half_of(set, f);
    const size_t skip[] = {offset * sizeof(uint16_t), offset * 3 % 5 * sizeof(uint16_t),
                           offset * sizeof(float)};
    uint16_t *acc = make(skip[0], n * sizeof *acc + GUARD);
    uint16_t *other = make(skip[1], n * sizeof *other);
    uint16_t *out = make(skip[1], n * sizeof *out + GUARD);
    float *x = make(skip[2], n * sizeof *x);
    float *decoded = make(skip[2], n * sizeof *decoded + GUARD);
    uint16_t *saved = make(0, n * sizeof *saved);
    size_t wrong = 0;
    fill(saved, RC_F16, n);
    fill(other, RC_F16, n);
    fill(x, RC_F32, n);

    half->encode(out, x, factor, n);
    for (size_t i = 0; i < n; i++)
        wrong += out[i] != encode_reference(f, x[i] * factor);

    half->decode(decoded, other, n);
    for (size_t i = 0; i < n; i++)
        wrong += !isnan(decoded[i]) && (double)decoded[i] != decode_reference(f, other[i]);
    wrong += !guard_holds(decoded, n * sizeof *decoded);

    for (int in_place = 0; in_place < 2; in_place++) {
        uint16_t *dst = in_place ? acc : out;
        memcpy(acc, saved, n * sizeof *acc);
        half->add(dst, acc, x, factor, post, n);
        for (size_t i = 0; i < n; i++) {
            const float term = contribution(f, x[i] * factor);
            const float sum = (float)decode_reference(f, saved[i]) + term;
            wrong += dst[i] != encode_reference(f, sum * post);
        }
    }
    for (enum alias alias = ALIAS_NONE; alias < ALIAS_COUNT; alias++) {
        uint16_t *dst = alias == ALIAS_A ? acc : alias == ALIAS_B ? other : out;
        memcpy(acc, saved, n * sizeof *acc);
        memcpy(decoded, other, n * sizeof *other); /* dst may be other itself */
        half->add_half(dst, acc, other, post, n);
        for (size_t i = 0; i < n; i++) {
            const uint16_t bits = ((const uint16_t *)decoded)[i];
            const float sum =
                (float)decode_reference(f, saved[i]) + (float)decode_reference(f, bits);
            wrong += dst[i] != encode_reference(f, sum * post);
        }
    }
    wrong += !guard_holds(out, n * sizeof *out);
    wrong += !guard_holds(acc, n * sizeof *acc);
    if (!CHECK_EQ(wrong, 0))
        CHECK_NOTE("  set %s format %s n %zu offset %zu factor %g post %g\n", set->name, f->name, n,
                   offset, (double)factor, (double)post);
    drop(acc, skip[0]);
    drop(other, skip[1]);
    drop(out, skip[1]);
    drop(x, skip[2]);
    drop(decoded, skip[2]);
    drop(saved, 0);
}

static void half_set(const kernel_set *set)
{
    for (const format *f = formats; f < formats + CHECK_COUNT(formats); f++)
        for (size_t s = 0; s < CHECK_COUNT(sizes); s++)
            for (size_t offset = 0; offset < 4; offset++)
                for (size_t p = 0; p < CHECK_COUNT(factors); p++)
                    half_case(set, f, sizes[s], offset, factors[p],
                              factors[(p + s + offset) % CHECK_COUNT(factors)]);
}

static void halves(void)
{
    each_set(half_set);
}

int main(void)
{
    static const check_test tests[] = {
        {"decode_all_patterns", decode_all_patterns},
        {"encode_every_class", encode_every_class},
        {"halves", halves},
    };
    for (size_t i = 0; i < CHECK_COUNT(formats); i++)
        list_values(&formats[i]);
    return check_run(tests, CHECK_COUNT(tests));
}

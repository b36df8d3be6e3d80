/* test_block_signs.c - signs with one scale for a tensor, in every kernel set, against their
 * formulas in double; and the sum of squares, whose order is part of its contract.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "../../csrc/kernels/kernels.h"
#include "block_reference.h"
#include "block_values.h"
#include "check.h"
#include "operands.h"

/* ---- signs ---- */

static float c_of(const float *src, const float *residual, size_t i)
{
    return residual ? (float)((double)src[i] + (double)residual[i]) : src[i];
}

/* Bits, or both NaN. */
static int same(float x, float y)
{
    return isnan(x) ? isnan(y) : bits_of(x) == bits_of(y);
}

typedef struct trial {
    size_t n, offset;
    enum values values;
    float scale;
    int with_residual, left, far; /* left: 0 none, 1 its own, 2 the residual's, 3 src's */
} trial;

static void note(const kernel_set *set, const trial *t)
{
    CHECK_NOTE("  set %s n %zu offset %zu values %d scale %g residual %d left %d far %d\n",
               set->name, t->n, t->offset, (int)t->values, (double)t->scale, t->with_residual,
               t->left, t->far);
}

static void sign_case(const kernel_set *set, const trial *t)
{
    const size_t n = t->n;
    const size_t bytes = n * sizeof(float), skip = t->offset * sizeof(float);
    const size_t codes_bytes = (n + 7) / 8;
    float *src = make(skip, bytes), *residual = make(skip, bytes);
    float *own = make(skip, bytes + GUARD), *acc = make(skip, bytes + GUARD);
    float *want_left = make(0, bytes), *want_acc = make(0, bytes);
    uint8_t *codes = make(t->offset, codes_bytes + GUARD), *want = make(0, codes_bytes);
    float *const old = t->with_residual ? residual : NULL;
    float *const lefts[] = {NULL, own, residual, src};
    fill_values(src, INT8, t->values, n);
    fill_values(residual, INT8, t->values, n);
    fill_values(acc, INT8, ORDINARY, n);
    memset(want, 0, codes_bytes);
    for (size_t i = 0; i < n; i++) {
        const float c = c_of(src, old, i);
        const double scale = (double)t->scale;
        want_left[i] = (float)((double)c - (c >= 0 ? scale : -scale));
        want_acc[i] = (float)((double)acc[i] + (c < 0 ? -scale : scale));
        want[i / 8] |= (uint8_t)(c < 0 ? 0 : 0x80 >> i % 8);
    }
    set->signs.encode(codes, lefts[t->left], src, old, t->scale, n, t->far);
    set->signs.add(acc, codes, t->scale, n);
    int good = CHECK(memcmp(codes, want, codes_bytes) == 0);
    good &= CHECK(guard_holds(codes, codes_bytes) && guard_holds(acc, bytes));
    good &= CHECK(guard_holds(own, t->left == 1 ? bytes : 0));
    for (size_t i = 0; i < n; i++) {
        good &= CHECK(!t->left || same(lefts[t->left][i], want_left[i]));
        good &= CHECK(same(acc[i], want_acc[i]));
    }
    if (!good)
        note(set, t);
    drop(src, skip);
    drop(residual, skip);
    drop(own, skip);
    drop(acc, skip);
    drop(want_left, 0);
    drop(want_acc, 0);
    drop(codes, t->offset);
    drop(want, 0);
}

static void sign_set(const kernel_set *set)
{
    static const float scales[] = {1.0f, 0.3f, 1e-3f, 0.0f, 3e38f, NAN};
    for (size_t n = 0; n <= 600; n++)
        for (size_t k = 0; k < 2; k++) {
            const unsigned pick = (unsigned)(random_bits() >> 40);
            sign_case(set, &(trial){.n = n,
                                    .offset = pick % 9,
                                    .values = (2 * n + k) % VALUES,
                                    .scale = scales[pick / 16 % CHECK_COUNT(scales)],
                                    .with_residual = pick / 256 % 4 != 0,
                                    .left = (int)(pick / 1024 % 4),
                                    .far = pick / 4096 % 2 != 0});
        }
}

static void signs(void)
{
    each_set(sign_set);
}

/* Zeros of both signs and NaN are 1; the first element is the highest bit. */
static void layout_set(const kernel_set *set)
{
    const float c[] = {-1, 1, -0.0f, 0, NAN, -INFINITY, -1, -1, -1, 2};
    uint8_t codes[3] = {0, 0, GUARD_BYTE};
    float left[10];
    set->signs.encode(codes, left, c, NULL, 0.5f, 10, 0);
    CHECK_EQ(codes[0], 0x78);
    CHECK_EQ(codes[1], 0x40);
    CHECK_EQ(codes[2], GUARD_BYTE);
    CHECK(left[0] == -0.5f && left[1] == 0.5f && left[2] == -0.5f && left[9] == 1.5f);
}

static void layout(void)
{
    each_set(layout_set);
}

/* ---- sums of squares ---- */

static void squares_set(const kernel_set *set)
{
    enum { MOST = 700 };
    for (size_t n = 0; n < MOST; n++) {
        float *src = make(n % 5 * 4, n * 4), *residual = make(n % 3 * 4, n * 4);
        float *const old = n % 4 ? residual : NULL;
        double lanes[KERNEL_LANES] = {0}, want[KERNEL_LANES] = {0}, parts[KERNEL_LANES] = {0};
        const size_t first = n / 64 * 32;
        fill_values(src, INT8, n % 7 ? ORDINARY : ANY, n);
        fill_values(residual, INT8, n % 7 ? ORDINARY : ANY, n);
        for (size_t i = 0; i < n; i++) {
            const double c = (double)c_of(src, old, i);
            want[i % KERNEL_LANES] += c * c;
        }
        set->signs.squares(lanes, src, old, n);
        set->signs.squares(parts, src, old, first);
        set->signs.squares(parts, src + first, old ? old + first : NULL, n - first);
        CHECK(memcmp(lanes, want, sizeof want) == 0);
        CHECK(memcmp(parts, want, sizeof want) == 0);
        drop(src, n % 5 * 4);
        drop(residual, n % 3 * 4);
    }
}

static void squares(void)
{
    each_set(squares_set);
}

/* 1 + 2^-53 is 1 in f64, so that the order shows: lanes 0 and 16 go first. */
static void lanes(void)
{
    double x[KERNEL_LANES] = {0};
    x[0] = 1;
    x[1] = 0x1p-53;
    x[17] = 0x1p-53;
    CHECK(kernel_sum_lanes(x) == 1 + 0x1p-52);
    x[17] = 0;
    x[16] = 0x1p-53;
    CHECK(kernel_sum_lanes(x) == 1);
    CHECK(x[0] == 1 && x[16] == 0x1p-53);
}

int main(void)
{
    static const check_test tests[] = {
        {"signs", signs},
        {"layout", layout},
        {"squares", squares},
        {"lanes", lanes},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

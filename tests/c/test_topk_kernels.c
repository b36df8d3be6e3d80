/* test_topk_kernels.c - the kernels of the format that keeps a few elements, in every set: its bits
 * are those of plain loops, for all sizes, offsets and classes of values.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/kernels/kernels.h"
#include "check.h"
#include "reference.h"

enum { MOST = 700, GUARD = 64 };

static uint64_t seed = 1442695040888963407u;

static uint32_t size_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

static float odd_value(void)
{
    static const float odd[] = {0.0F, -0.0F, INFINITY, -INFINITY, 0x1p-149F, -0x1p-126F, 1.0F};
    uint32_t bits = (uint32_t)draw(&seed);
    float x;
    memcpy(&x, &bits, sizeof x); /* any bits at all */
    switch (draw_below(&seed, 4)) {
    case 0: return odd[draw_below(&seed, CHECK_COUNT(odd))];
    case 1: return x;
    default: return (float)((int)draw_below(&seed, 2001) - 1000) * 0.01F;
    }
}

static void fill(float *x, size_t n, int odd)
{
    for (size_t i = 0; i < n; i++)
        x[i] = odd ? odd_value() : (float)((int)draw_below(&seed, 2001) - 1000) * 0.01F;
}

/* NaNs of a sum may have any payload. */
static int alike(float got, float want)
{
    return memcmp(&got, &want, sizeof got) == 0 || (got != got && want != want);
}

static void pick_once(const kernel_set *set, size_t n, size_t offset, int with_residual,
                      int with_left, int far, uint32_t least)
{
    _Alignas(64) float src[MOST + GUARD], residual[MOST + GUARD], left[MOST + GUARD];
    uint16_t index[MOST + 1];
    float value[MOST + 1];
    size_t want = 0;
    fill(src, MOST + GUARD, n % 2 == 0);
    fill(residual, MOST + GUARD, 0);
    fill(left, MOST + GUARD, 0);
    index[n] = 0xabcd;
    value[n] = 7.0F;
    float before = left[offset + n];
    size_t count = set->topk.pick(index, value, with_left ? left + offset : NULL, src + offset,
                                  with_residual ? residual + offset : NULL, least, n, far);
    for (size_t i = 0; i < n; i++) {
        float x = src[offset + i], c = with_residual ? x + residual[offset + i] : x;
        int large = size_of(c) >= least;
        if (with_left)
            CHECK(alike(left[offset + i], large ? 0.0F : c));
        if (large && CHECK(want < count)) {
            CHECK_EQ(index[want], i);
            CHECK(alike(value[want], c));
            want++;
        }
    }
    if (!CHECK_EQ(count, want) || !CHECK(left[offset + n] == before))
        CHECK_NOTE("set %s n %zu offset %zu residual %d left %d far %d least %x\n", set->name, n,
                   offset, with_residual, with_left, far, least);
    CHECK_EQ(index[n], 0xabcd);
    CHECK(value[n] == 7.0F);
}

static void put_once(const kernel_set *set, size_t n, size_t offset, int far, unsigned one_in)
{
    _Alignas(64) float dst[MOST + GUARD], want[MOST + GUARD];
    uint16_t index[MOST];
    uint8_t values[4 * MOST + 2];
    size_t count = 0;
    fill(dst, MOST + GUARD, 0);
    memcpy(want, dst, sizeof dst);
    for (size_t i = 0; i < n; i++) {
        want[offset + i] = 0.0F;
        if (draw_below(&seed, one_in) > 0)
            continue;
        want[offset + i] = odd_value();
        index[count] = (uint16_t)i;
        memcpy(values + 2 + 4 * count++, &want[offset + i], 4);
    }
    set->topk.put(dst + offset, index, values + 2, count, n, far);
    if (!CHECK(memcmp(dst, want, sizeof dst) == 0))
        CHECK_NOTE("put: set %s n %zu offset %zu far %d count %zu\n", set->name, n, offset, far,
                   count);
}

static void tops_once(const kernel_set *set, size_t groups)
{
    float src[MOST], tops[MOST / KERNEL_TOPK_GROUP + 1];
    fill(src, MOST, 1);
    tops[groups] = 7.0F;
    set->topk.tops(tops, src, groups);
    for (size_t g = 0; g < groups; g++) {
        uint32_t top = 0;
        for (size_t i = g * KERNEL_TOPK_GROUP; i < (g + 1) * KERNEL_TOPK_GROUP; i++)
            top = size_of(src[i]) > top ? size_of(src[i]) : top;
        CHECK_EQ(size_of(tops[g]), top);
    }
    CHECK(tops[groups] == 7.0F);
}

static void each_set(void (*run)(const kernel_set *))
{
    for (int i = 0; kernels_at(i) != NULL; i++)
        if (kernels_at(i)->supported())
            run(kernels_at(i));
}

static void pick_in(const kernel_set *set)
{
    static const uint32_t sizes[] = {1, 0x00800000, 0x40a00000, 0x41180000, 0x7f800000, 0x7fffffff};
    for (size_t n = 0; n <= MOST; n += n < 140 ? 1 : 53)
        for (int how = 0; how < 8; how++)
            pick_once(set, n, draw_below(&seed, 17), how & 1, how & 2, how & 4,
                      sizes[draw_below(&seed, CHECK_COUNT(sizes))]);
}

static void put_in(const kernel_set *set)
{
    for (size_t n = 0; n <= MOST; n += n < 140 ? 1 : 53)
        for (int how = 0; how < 8; how++)
            put_once(set, n, how < 4 ? 4 * draw_below(&seed, 4) : draw_below(&seed, 17), how & 1,
                     1U << draw_below(&seed, 9));
}

static void tops_in(const kernel_set *set)
{
    for (size_t groups = 0; groups <= MOST / KERNEL_TOPK_GROUP; groups++)
        tops_once(set, groups);
}

static void pick_is_a_loop(void)
{
    each_set(pick_in);
}

static void put_is_a_loop(void)
{
    each_set(put_in);
}

static void tops_are_the_largest(void)
{
    each_set(tops_in);
}

int main(void)
{
    static const check_test tests[] = {
        {"pick_is_a_loop", pick_is_a_loop},
        {"put_is_a_loop", put_is_a_loop},
        {"tops_are_the_largest", tops_are_the_largest},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

/* test_sparse_kernels.c - kernels that take and put a few elements, in every set: their bits are
 * those of plain loops, for all sizes, offsets and classes of values.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/kernels/kernels.h"
#include "check.h"
#include "draw.h"

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

static void pick_once(const kernel_set *set, size_t n, size_t offset, uint32_t least)
{
    _Alignas(64) float x[MOST + GUARD];
    uint16_t index[MOST + 1];
    float value[MOST + 1];
    size_t want = 0;
    fill(x, MOST + GUARD, n % 2 == 0);
    index[n] = 0xabcd;
    value[n] = 7.0F;
    size_t count = set->sparse.pick(index, value, x + offset, least, n);
    for (size_t i = 0; i < n; i++)
        if (size_of(x[offset + i]) >= least && CHECK(want < count)) {
            CHECK_EQ(index[want], i);
            CHECK(memcmp(&value[want], &x[offset + i], sizeof value[0]) == 0);
            want++;
        }
    if (!CHECK_EQ(count, want))
        CHECK_NOTE("set %s n %zu offset %zu least %x\n", set->name, n, offset, least);
    CHECK_EQ(index[n], 0xabcd);
    CHECK(value[n] == 7.0F);
}

static void put_once(const kernel_set *set, size_t n, size_t offset, int far, unsigned one_in)
{
    _Alignas(64) float dst[MOST + GUARD], want[MOST + GUARD];
    uint16_t index[MOST];
    float values[MOST];
    size_t count = 0;
    fill(dst, MOST + GUARD, 0);
    memcpy(want, dst, sizeof dst);
    for (size_t i = 0; i < n; i++) {
        want[offset + i] = 0.0F;
        if (draw_below(&seed, one_in) > 0)
            continue;
        want[offset + i] = odd_value();
        index[count] = (uint16_t)i;
        values[count++] = want[offset + i];
    }
    set->sparse.put(dst + offset, index, values, count, n, far);
    if (!CHECK(memcmp(dst, want, sizeof dst) == 0))
        CHECK_NOTE("put: set %s n %zu offset %zu far %d count %zu\n", set->name, n, offset, far,
                   count);
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
        for (int again = 0; again < 8; again++)
            pick_once(set, n, draw_below(&seed, 17), sizes[draw_below(&seed, CHECK_COUNT(sizes))]);
}

static void put_in(const kernel_set *set)
{
    for (size_t n = 0; n <= MOST; n += n < 140 ? 1 : 53)
        for (int how = 0; how < 8; how++)
            put_once(set, n, how < 4 ? 4 * draw_below(&seed, 4) : draw_below(&seed, 17), how & 1,
                     1U << draw_below(&seed, 9));
}

static void pick_is_a_loop(void)
{
    each_set(pick_in);
}

static void put_is_a_loop(void)
{
    each_set(put_in);
}

int main(void)
{
    static const check_test tests[] = {
        {"pick_is_a_loop", pick_is_a_loop},
        {"put_is_a_loop", put_is_a_loop},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

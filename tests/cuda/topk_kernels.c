/* topk_kernels.c - what topk.cuh does, by the core's codec, as block_kernels.c has it of codecs of
 * blocks. For small_kernels.c.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/codec/topk.h"
#include "block_kernels.h"

static uint64_t number(const arguments *a, int which)
{
    uint64_t x;
    memcpy(&x, a->params[which], sizeof x);
    return x;
}

static void *place(const arguments *a, int which)
{
    return a->at(a->params[which]);
}

static uint64_t hash(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static void sample(const arguments *a)
{
    float *out = place(a, 0);
    const float *src = place(a, 1), *residual = place(a, 2);
    uint64_t size = number(a, 3), run = number(a, 4), gap = number(a, 7);
    uint64_t n = number(a, 5) - gap, turn = hash(number(a, 8));
    for (uint64_t i = 0; i < size; i++) {
        uint64_t runs = size / run, k = i / run, at = i;
        if (size < n) {
            uint64_t start = n / runs * k + n % runs * k / runs;
            uint64_t end = n / runs * (k + 1) + n % runs * (k + 1) / runs;
            at = start + hash(turn + k) % (end - start - run + 1) + i % run;
        }
        at += at >= number(a, 6) ? gap : 0;
        out[i] = residual != NULL ? src[at] + residual[at] : src[at];
    }
}

static uint32_t size_of(const void *x)
{
    uint32_t bits;
    memcpy(&bits, x, sizeof bits);
    return bits & 0x7fffffff;
}

static int descending(const void *a, const void *b)
{
    return (size_of(a) < size_of(b)) - (size_of(a) > size_of(b));
}

static void least(const arguments *a)
{
    uint32_t *threshold = place(a, 0);
    float *all = place(a, 1);
    uint64_t size = number(a, 2), kept = number(a, 3), large = 0;
    if (size == 0)
        return;
    qsort(all, size, sizeof *all, descending);
    uint32_t found = size_of(&all[kept > 0 ? kept - 1 : 0]);
    while (large < size && size_of(&all[large]) >= found)
        large++;
    threshold[0] = found > 0 ? found : 1;
    threshold[1] = found > 0 && large > kept + kept / 4 + 8;
}

/* Elements of a segment; *start: the first. */
static size_t extent(const arguments *a, int first, uint64_t s, uint64_t *start)
{
    uint64_t n = number(a, first), part = number(a, first + 1), each = number(a, first + 2);
    uint64_t segment = number(a, first + 3), end = (s / each + 1) * part;
    *start = s / each * part + s % each * segment;
    end = end < n ? end : n;
    return *start >= end ? 0 : end - *start < segment ? end - *start : segment;
}

static uint64_t segments(const arguments *a, int first)
{
    uint64_t n = number(a, first), part = number(a, first + 1);
    return n == 0 ? 0 : (n + part - 1) / part * number(a, first + 2);
}

static void pack(const arguments *a)
{
    uint32_t *kept = place(a, 1), *threshold = place(a, 11), *poisoned = place(a, 15), cap;
    float *left = place(a, 2);
    const float *src = place(a, 3), *residual = place(a, 4);
    topk t = {.kernels = &kernels_scalar, .dtype = RC_F32, .post = 1.0F};
    uint64_t longest = number(a, 8), start;
    int found = 0;
    if (segments(a, 5) == 0)
        return;
    memcpy(&t.density, a->params[12], sizeof t.density);
    memcpy(&cap, a->params[13], sizeof cap);
    t.least = threshold[0];
    t.tied = threshold[1] != 0;
    t.turn = hash(number(a, 14));
    t.most = cap;
    t.values = malloc(longest * sizeof *t.values);
    t.index = malloc(longest * sizeof *t.index);
    for (uint64_t s = 0; s < segments(a, 5); s++) {
        uint8_t *wire = (uint8_t *)place(a, 0) + s * number(a, 9);
        size_t n = extent(a, 5, s, &start);
        kept[s] = 0;
        if (s / number(a, 7) != number(a, 10))
            kept[s] = (uint32_t)(topk_encode(&t, wire, src + start,
                                             residual != NULL ? residual + start : NULL,
                                             left != NULL ? left + start : NULL, n, &found) /
                                 TOPK_BYTES);
    }
    *poisoned = found ? 1 : *poisoned;
    free(t.values);
    free(t.index);
}

static void unpack(const arguments *a)
{
    float *dst = place(a, 0);
    const uint32_t *kept = place(a, 2);
    topk t = {.kernels = &kernels_scalar, .dtype = RC_F32};
    uint64_t start;
    int found = 0;
    for (uint64_t s = 0; s < segments(a, 3); s++) {
        size_t n = extent(a, 3, s, &start);
        const uint8_t *wire = (const uint8_t *)place(a, 1) + s * number(a, 7);
        topk_store(&t, dst + start, wire, kept[s] * (size_t)TOPK_BYTES, n, &found);
    }
    if (found)
        *(uint32_t *)place(a, 8) = 1;
}

int topk_kernels_launch(const char *name, const arguments *a)
{
    static const struct {
        const char *name;
        void (*run)(const arguments *a);
    } all[] = {{"ringcomm_sample_topk", sample},
               {"ringcomm_least_topk", least},
               {"ringcomm_pack_topk", pack},
               {"ringcomm_unpack_topk", unpack}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(name, all[i].name) == 0) {
            all[i].run(a);
            return 1;
        }
    return 0;
}

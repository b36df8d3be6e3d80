/* kernels.c - one kernel set's codecs, each beside a memory copy of the same traffic; kernels.py
 * builds it and makes a table of what it prints.
 *
 *   kernels SET ELEMENTS ROUNDS FAR OFFSET
 *
 * One line per codec and direction: "codec direction bytes seconds ratio low high": bytes read and
 * written per element, the median of a call's seconds, and median, smallest and largest ratio of
 * the copy's time to the call's. A copy moves half of the traffic from one place to another. It
 * runs before every call, and a ratio is that of one such pair, so that what else the machine does
 * hits both. Tensors start OFFSET bytes into a page; copies at pages.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../csrc/kernels/kernels.h"

enum { PAGE = 4096 };

typedef struct room {
    size_t n;
    int far;
    float *src, *residual, *left, *acc;
    uint16_t *scales, *half;
    uint8_t *codes, *from, *to;
} room;

typedef enum direction { ENCODE, DECODE, ADD, DIRECTIONS } direction;

static const char *const direction_names[DIRECTIONS] = {"encode", "decode", "decode-add"};
static volatile int poisoned;

/* One format; the others are NULL. */
typedef struct codec {
    const char *name;
    const kernel_half *half;
    const kernel_block *block;
} codec;

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

static void *pages(size_t bytes, size_t offset)
{
    uint8_t *data = aligned_alloc(PAGE, (bytes + offset + PAGE) / PAGE * PAGE);
    if (!data)
        abort();
    memset(data, 0, bytes + offset);
    return data + offset;
}

static room *furnish(size_t n, int far, size_t offset)
{
    static room r;
    const size_t bytes = n * sizeof(float);
    r = (room){.n = n,
               .far = far,
               .src = pages(bytes, offset),
               .residual = pages(bytes, offset),
               .left = pages(bytes, offset),
               .acc = pages(bytes, offset),
               .half = pages(n * sizeof(uint16_t), offset),
               .scales = pages(n / 32 + PAGE, 0),
               .codes = pages(n, 0),
               .from = pages(7 * n, 0),
               .to = pages(7 * n, 0)};
    uint32_t state = 1;
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525 + 1013904223;
        r.src[i] = (float)(int32_t)state * 0x1p-31f;
        r.residual[i] = (float)(int32_t)(state << 7) * 0x1p-32f;
    }
    return &r;
}

static void half_call(const kernel_half *half, direction direction, room *r)
{
    if (direction == ENCODE)
        half->encode(r->half, r->src, 1.0f, r->n);
    else if (direction == DECODE)
        half->decode(r->acc, r->half, r->n);
    else
        half->add(r->half, r->half, r->src, 1.0f, 1.0f, r->n);
}

static void block_call(const kernel_block *block, direction direction, room *r)
{
    if (direction == ENCODE)
        poisoned |=
            block->encode(r->scales, r->codes, r->left, r->src, 1.0f, r->residual, r->n, r->far);
    else if (direction == DECODE)
        poisoned |= block->decode(r->acc, r->scales, r->codes, r->n, r->far);
    else
        poisoned |= block->add(r->acc, r->scales, r->codes, r->n);
}

static void call(const codec *c, direction direction, room *r)
{
    if (c->half)
        half_call(c->half, direction, r);
    else
        block_call(c->block, direction, r);
}

/* Bytes read and written per element. */
static double traffic(const codec *c, direction direction)
{
    if (c->half)
        return direction == ADD ? 8 : 6;
    const double wire = (double)(c->block->bytes + 2) / (double)c->block->block;
    return direction == ENCODE ? wire + 12 : direction == DECODE ? wire + 4 : wire + 8;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(const codec *c, direction direction, room *r, size_t rounds)
{
    enum { MOST = 1000 };
    const double bytes = traffic(c, direction);
    const size_t copied = (size_t)(bytes / 2 * (double)r->n);
    double seconds[MOST], ratios[MOST];
    for (size_t i = 0; i < rounds + 1 && i < MOST; i++) {
        const double start = now();
        memcpy(r->to, r->from, copied);
        __asm__ volatile("" : : "r"(r->to) : "memory");
        const double middle = now();
        call(c, direction, r);
        const double end = now();
        if (i > 0) {
            seconds[i - 1] = end - middle;
            ratios[i - 1] = (middle - start) / (end - middle);
        }
    }
    qsort(seconds, rounds, sizeof *seconds, ascending);
    qsort(ratios, rounds, sizeof *ratios, ascending);
    printf("%s %s %.9g %.9g %.4f %.4f %.4f\n", c->name, direction_names[direction], bytes,
           seconds[rounds / 2], ratios[rounds / 2], ratios[0], ratios[rounds - 1]);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    const kernel_set *set = argc == 6 ? kernels_find(argv[1]) : NULL;
    if (!set) {
        fprintf(stderr, "usage: kernels SET ELEMENTS ROUNDS FAR OFFSET\n");
        return 2;
    }
    const size_t rounds = strtoull(argv[3], NULL, 10);
    room *r = furnish(strtoull(argv[2], NULL, 10), atoi(argv[4]), strtoull(argv[5], NULL, 10));
    const codec codecs[] = {
        {"bf16", &set->bf16, NULL}, {"fp16", &set->fp16, NULL},     {"int8", NULL, &set->int8},
        {"int4", NULL, &set->int4}, {"onebit", NULL, &set->onebit}, {"fp8", NULL, &set->fp8},
    };
    for (size_t i = 0; i < sizeof codecs / sizeof *codecs; i++)
        for (direction direction = ENCODE; direction < DIRECTIONS; direction++)
            measure(&codecs[i], direction, r, rounds);
    return poisoned;
}

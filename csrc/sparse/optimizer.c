/* optimizer.c - optimizer steps that touch only the units that were received. See payload.h.
 *
 * Problem. Of a hundred units one is received, so that a step is as fast as the lines of its
 * weights and states come from memory, and no prefetcher sees where the next one is.
 *
 * Design. One cursor goes through the units and prefetches their lines; another, AHEAD units behind
 * it, does the arithmetic. A block of 16 floats is a line of each of the arrays that begins at one,
 * else it lies in two.
 */
#include "payload.h"

#include <math.h>
#include <string.h>

enum {
    AHEAD = 32, /* units whose lines are being fetched */
    AGES = 512, /* steps since a unit was touched for which its decay is kept */
};

/* Position in a walk through the units of a tensor. */
typedef struct cursor {
    const rc_sparse_format *format;
    const uint32_t *counts;
    const uint16_t *index;
    uint64_t chunk, chunks;
    uint32_t left; /* units of this chunk still to come */
} cursor;

static cursor first_entry(const rc_sparse_format *f, const rc_sparse_entries *entries,
                          uint64_t count)
{
    uint64_t chunks = (count + f->chunk - 1) / f->chunk;
    uint32_t left = chunks > 0 ? entries->counts[0] : 0;
    return (cursor){f, entries->counts, entries->index, 0, chunks, left};
}

/* Sets *unit to the next unit's number in the tensor. Returns 0 after the last. */
static int next(cursor *c, uint64_t *unit)
{
    while (c->left == 0) {
        if (c->chunk + 1 >= c->chunks)
            return 0;
        c->left = c->counts[++c->chunk];
    }
    c->left--;
    *unit = c->chunk * (c->format->chunk / c->format->block) + *c->index++;
    return 1;
}

/* Arguments of a visit to all units. */
typedef struct visiting {
    const rc_sparse_format *format;
    const kernel_set *kernels;
    uint64_t count;
    uint8_t *arrays[3]; /* of the tensor's elements, whose lines are fetched; NULL: unused */
    size_t width;       /* bytes of an element */
    uint32_t *last;
    kernel_sgd sgd;
    kernel_adam adam;
    uint32_t number;
    float *decays; /* by age, AGES of them; below 0: not known yet */
} visiting;

typedef void unit_fn(const visiting *v, uint64_t unit, float *values, size_t n);

/* Prefetches both ends of a unit, which lies in two lines unless its array begins at one. Inlined
 * by force: a compiler that takes prefetches for nothing leaves out the calls of a function that
 * does no more.
 */
static inline __attribute__((always_inline)) void fetch(const visiting *v, uint64_t unit)
{
    size_t bytes = v->format->block * v->width;
    for (int i = 0; i < 3; i++) {
        if (v->arrays[i] != NULL) {
            __builtin_prefetch(v->arrays[i] + unit * bytes, 1);
            __builtin_prefetch(v->arrays[i] + unit * bytes + bytes - 1, 1);
        }
    }
    if (v->last != NULL)
        __builtin_prefetch(v->last + unit, 1);
}

static void visit(const visiting *v, const rc_sparse_entries *entries, unit_fn *does)
{
    size_t block = v->format->block;
    uint64_t unit, far;
    cursor now = first_entry(v->format, entries, v->count), ahead = now;
    float *values = entries->values;
    for (int i = 0; i < AHEAD && next(&ahead, &far); i++)
        fetch(v, far);
    for (; next(&now, &unit); values += block) {
        uint64_t left = v->count - unit * block;
        if (next(&ahead, &far))
            fetch(v, far);
        does(v, unit, values, left < block ? (size_t)left : block);
    }
}

/* Returns the elements of a unit in the i-th array of floats. */
static float *floats_at(const visiting *v, int i, uint64_t unit)
{
    return (float *)(void *)v->arrays[i] + unit * v->format->block;
}

double sparse_power(double x, uint32_t n)
{
    double power = 1.0;
    for (; n > 0; n >>= 1, x *= x)
        if (n & 1)
            power *= x;
    return power;
}

/* Returns the factor that remains of a momentum after so many steps. */
static float decay_of(const visiting *v, uint32_t age)
{
    if (age >= AGES)
        return (float)sparse_power((double)v->sgd.momentum, age);
    if (v->decays[age] < 0.0f)
        v->decays[age] = (float)sparse_power((double)v->sgd.momentum, age);
    return v->decays[age];
}

static void sgd_unit(const visiting *v, uint64_t unit, float *gradient, size_t n)
{
    float decay = 0.0f, *momentum = NULL;
    if (v->last != NULL) {
        momentum = floats_at(v, 1, unit);
        decay = decay_of(v, v->number - v->last[unit]);
        v->last[unit] = v->number;
    }
    v->kernels->sparse.sgd(&v->sgd, decay, floats_at(v, 0, unit), momentum, gradient, n);
}

static void adam_unit(const visiting *v, uint64_t unit, float *gradient, size_t n)
{
    v->kernels->sparse.adam(&v->adam, floats_at(v, 0, unit), floats_at(v, 1, unit),
                            floats_at(v, 2, unit), gradient, n);
}

static void take_unit(const visiting *v, uint64_t unit, float *values, size_t n)
{
    memcpy(values, floats_at(v, 0, unit), n * sizeof *values);
}

static void put_floats(const visiting *v, uint64_t unit, float *values, size_t n)
{
    memcpy(floats_at(v, 0, unit), values, n * sizeof *values);
}

static void put_halves(const visiting *v, uint64_t unit, float *values, size_t n)
{
    uint16_t *out = (uint16_t *)(void *)v->arrays[0] + unit * v->format->block;
    v->kernels->bf16.encode(out, values, 1.0f, n);
}

void sparse_sgd_step(const rc_sparse_format *format, const kernel_set *kernels,
                     const rc_sparse_entries *entries, const rc_sparse_sgd_step *step,
                     float *weights, uint64_t count, float *buffer, uint32_t *last)
{
    float decays[AGES];
    for (size_t i = 0; i < AGES; i++)
        decays[i] = -1.0f;
    visiting v = {.format = format,
                  .kernels = kernels,
                  .count = count,
                  .arrays = {(uint8_t *)weights, (uint8_t *)buffer, NULL},
                  .width = sizeof(float),
                  .last = last,
                  .sgd = {step->lr, step->momentum, step->weight_decay, step->nesterov},
                  .number = step->number,
                  .decays = decays};
    visit(&v, entries, sgd_unit);
}

void sparse_adam_step(const rc_sparse_format *format, const kernel_set *kernels,
                      const rc_sparse_entries *entries, const rc_sparse_adam_step *step,
                      float *weights, uint64_t count, float *first, float *second)
{
    double bias1 = 1.0 - sparse_power(step->beta1, step->number);
    double bias2 = 1.0 - sparse_power(step->beta2, step->number);
    double decay = step->decoupled ? step->lr * step->weight_decay : 0.0;
    visiting v = {.format = format,
                  .kernels = kernels,
                  .count = count,
                  .arrays = {(uint8_t *)weights, (uint8_t *)first, (uint8_t *)second},
                  .width = sizeof(float),
                  .adam = {.beta1 = (float)step->beta1,
                           .beta2 = (float)step->beta2,
                           .rest1 = (float)(1.0 - step->beta1),
                           .rest2 = (float)(1.0 - step->beta2),
                           .step = (float)(step->lr / bias1),
                           .root_scale = (float)(1.0 / sqrt(bias2)),
                           .eps = (float)step->eps,
                           .l2 = step->decoupled ? 0.0f : (float)step->weight_decay,
                           .keep = (float)(1.0 - decay)}};
    visit(&v, entries, adam_unit);
}

void sparse_take(const rc_sparse_format *format, const rc_sparse_entries *entries,
                 const float *dense, uint64_t count)
{
    visiting v = {.format = format,
                  .count = count,
                  .arrays = {(uint8_t *)(uintptr_t)dense, NULL, NULL},
                  .width = sizeof(float)};
    visit(&v, entries, take_unit);
}

void sparse_put(const rc_sparse_format *format, const kernel_set *kernels,
                const rc_sparse_entries *entries, void *dense, rc_dtype dtype, uint64_t count)
{
    visiting v = {.format = format,
                  .kernels = kernels,
                  .count = count,
                  .arrays = {dense, NULL, NULL},
                  .width = dtype == RC_F32 ? sizeof(float) : sizeof(uint16_t)};
    visit(&v, entries, dtype == RC_F32 ? put_floats : put_halves);
}

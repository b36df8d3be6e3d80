/* optimizer.c - see optimizer.h. */
#include "optimizer.h"

#include <math.h>
#include <string.h>

enum { AHEAD = 12 }; /* units whose lines are on their way */

/* Where a walk through the units of a tensor is. */
typedef struct cursor {
    const rc_sparse_format *format;
    const uint32_t *counts;
    const uint16_t *index;
    uint64_t chunk, chunks;
    uint32_t left; /* units of this chunk that are to come */
} cursor;

static cursor begin(const rc_sparse_format *f, const rc_sparse_entries *entries, uint64_t count)
{
    uint64_t chunks = (count + f->chunk - 1) / f->chunk;
    uint32_t left = chunks > 0 ? entries->counts[0] : 0;
    return (cursor){f, entries->counts, entries->index, 0, chunks, left};
}

/* The next unit's number in the tensor: *unit. 0 after the last. */
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

/* What a step is made of. */
typedef struct stepping {
    const rc_sparse_format *format;
    const kernel_set *kernels;
    const rc_sparse_weights *weights;
    float *states[2];
    uint32_t *last;
    kernel_sgd sgd;
    kernel_adam adam;
    uint32_t number;
} stepping;

typedef void unit_step(const stepping *s, uint64_t unit, const float *gradient, size_t n);

static void fetch(const stepping *s, uint64_t unit)
{
    uint64_t at = unit * s->format->block;
    __builtin_prefetch(s->weights->master + at, 1);
    for (int i = 0; i < 2; i++)
        if (s->states[i] != NULL)
            __builtin_prefetch(s->states[i] + at, 1);
    if (s->last != NULL)
        __builtin_prefetch(s->last + unit, 1);
    if (s->weights->out != NULL && s->weights->out_dtype == RC_F32)
        __builtin_prefetch((float *)s->weights->out + at, 1);
    else if (s->weights->out != NULL)
        __builtin_prefetch((uint16_t *)s->weights->out + at, 1);
}

static void write_back(const stepping *s, uint64_t at, size_t n)
{
    const rc_sparse_weights *w = s->weights;
    if (w->out == NULL)
        return;
    if (w->out_dtype == RC_F32)
        memcpy((float *)w->out + at, w->master + at, n * sizeof(float));
    else
        s->kernels->bf16.encode((uint16_t *)w->out + at, w->master + at, 1.0f, n);
}

static void each(const stepping *s, const rc_sparse_entries *entries, unit_step *step)
{
    size_t block = s->format->block;
    uint64_t count = s->weights->count, unit, far;
    cursor now = begin(s->format, entries, count), ahead = now;
    const float *gradient = entries->values;
    for (int i = 0; i < AHEAD && next(&ahead, &far); i++)
        fetch(s, far);
    for (; next(&now, &unit); gradient += block) {
        uint64_t at = unit * block;
        size_t n = count - at < block ? (size_t)(count - at) : block;
        if (next(&ahead, &far))
            fetch(s, far);
        step(s, unit, gradient, n);
        write_back(s, at, n);
    }
}

double sparse_power(double x, uint32_t n)
{
    double power = 1.0;
    for (; n > 0; n >>= 1, x *= x)
        if (n & 1)
            power *= x;
    return power;
}

static void sgd_unit(const stepping *s, uint64_t unit, const float *gradient, size_t n)
{
    uint64_t at = unit * s->format->block;
    float decay = 0.0f, *momentum = NULL;
    if (s->states[0] != NULL) {
        momentum = s->states[0] + at;
        decay = (float)sparse_power((double)s->sgd.momentum, s->number - s->last[unit]);
        s->last[unit] = s->number;
    }
    s->kernels->sparse.sgd(&s->sgd, decay, s->weights->master + at, momentum, gradient, n);
}

static void adam_unit(const stepping *s, uint64_t unit, const float *gradient, size_t n)
{
    uint64_t at = unit * s->format->block;
    s->kernels->sparse.adam(&s->adam, s->weights->master + at, s->states[0] + at, s->states[1] + at,
                            gradient, n);
}

void sparse_sgd_step(const rc_sparse_format *format, const kernel_set *kernels,
                     const rc_sparse_entries *entries, const rc_sparse_sgd_step *step,
                     const rc_sparse_weights *weights, float *buffer, uint32_t *last)
{
    stepping s = {.format = format,
                  .kernels = kernels,
                  .weights = weights,
                  .states = {buffer, NULL},
                  .last = last,
                  .sgd = {step->lr, step->momentum, step->weight_decay, step->nesterov},
                  .number = step->number};
    each(&s, entries, sgd_unit);
}

void sparse_adam_step(const rc_sparse_format *format, const kernel_set *kernels,
                      const rc_sparse_entries *entries, const rc_sparse_adam_step *step,
                      const rc_sparse_weights *weights, float *first, float *second)
{
    double bias1 = 1.0 - sparse_power(step->beta1, step->number);
    double bias2 = 1.0 - sparse_power(step->beta2, step->number);
    double decay = step->decoupled ? step->lr * step->weight_decay : 0.0;
    stepping s = {.format = format,
                  .kernels = kernels,
                  .weights = weights,
                  .states = {first, second},
                  .adam = {.beta1 = (float)step->beta1,
                           .beta2 = (float)step->beta2,
                           .rest1 = (float)(1.0 - step->beta1),
                           .rest2 = (float)(1.0 - step->beta2),
                           .step = (float)(step->lr / bias1),
                           .root_scale = (float)(1.0 / sqrt(bias2)),
                           .eps = (float)step->eps,
                           .l2 = step->decoupled ? 0.0f : (float)step->weight_decay,
                           .keep = (float)(1.0 - decay)},
                  .number = step->number};
    each(&s, entries, adam_unit);
}

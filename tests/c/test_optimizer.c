/* test_optimizer.c - optimizer steps of a few units: the bits of plain loops with every
 * kernel set, and nothing else is touched.
 */
#include <math.h>

#include "../../csrc/sparse/payload.h"
#include "check.h"
#include "sparse_values.h"

enum { COUNT = 5003, CHUNK = 1008, CHUNKS = 5, STEPS = 5 };

typedef struct world {
    rc_sparse_format format;
    rc_sparse_entries entries;
    uint32_t counts[CHUNKS];
    uint16_t index[COUNT];
    float values[COUNT + 16];
    uint64_t unit[COUNT];
    size_t units;
} world;

/* Every third unit or so, never the same ones. */
static void draw_units(world *w)
{
    size_t block = w->format.block;
    w->entries = (rc_sparse_entries){w->counts, w->index, w->values};
    w->units = 0;
    memset(w->counts, 0, sizeof w->counts);
    for (size_t unit = 0; unit * block < COUNT; unit++) {
        size_t per_chunk = CHUNK / block;
        if (draw_below(&sparse_seed, 3) != 0 || unit / per_chunk == 2)
            continue; /* of the third chunk none */
        w->counts[unit / per_chunk]++;
        w->index[w->units] = (uint16_t)(unit % per_chunk);
        w->unit[w->units++] = unit;
    }
    float *values = sparse_fill(w->units * block);
    memcpy(w->values, values, w->units * block * sizeof *values);
    free(values);
}

typedef struct state {
    float weights[COUNT], first[COUNT], second[COUNT];
    uint32_t last[COUNT];
} state;

static void slow_sgd(const world *w, const rc_sparse_sgd_step *s, state *x)
{
    for (size_t u = 0; u < w->units; u++) {
        float decay = (float)sparse_power((double)s->momentum, s->number - x->last[w->unit[u]]);
        x->last[w->unit[u]] = s->number;
        for (size_t e = 0; e < w->format.block; e++) {
            size_t i = (size_t)w->unit[u] * w->format.block + e;
            if (i >= COUNT)
                break;
            float weighted = s->weight_decay * x->weights[i];
            float g = w->values[u * w->format.block + e] + weighted;
            float kept = x->first[i] * decay;
            x->first[i] = kept + g;
            float ahead = s->momentum * x->first[i];
            float by = s->nesterov ? g + ahead : x->first[i];
            float moved = s->lr * by;
            x->weights[i] = x->weights[i] - moved;
        }
    }
}

static void slow_adam(const world *w, const rc_sparse_adam_step *s, state *x)
{
    float rate = (float)(s->lr / (1.0 - sparse_power(s->beta1, s->number)));
    float scale = (float)(1.0 / sqrt(1.0 - sparse_power(s->beta2, s->number)));
    float keep = (float)(1.0 - (s->decoupled ? s->lr * s->weight_decay : 0.0));
    float l2 = s->decoupled ? 0.0F : (float)s->weight_decay;
    for (size_t u = 0; u < w->units; u++) {
        for (size_t e = 0; e < w->format.block; e++) {
            size_t i = (size_t)w->unit[u] * w->format.block + e;
            if (i >= COUNT)
                break;
            float weighted = l2 * x->weights[i];
            float g = w->values[u * w->format.block + e] + weighted, square = g * g;
            float m = x->first[i] * (float)s->beta1, v = x->second[i] * (float)s->beta2;
            float more = (float)(1.0 - s->beta1) * g, squares = (float)(1.0 - s->beta2) * square;
            x->first[i] = m + more;
            x->second[i] = v + squares;
            float root = sqrtf(x->second[i]) * scale, kept = x->weights[i] * keep;
            float moved = rate * (x->first[i] / (root + (float)s->eps));
            x->weights[i] = kept - moved;
        }
    }
}

static void start(state *x)
{
    float *weights = sparse_fill(COUNT);
    memset(x, 0, sizeof *x);
    memcpy(x->weights, weights, sizeof x->weights);
    free(weights);
}

static void steps_are_those_of_plain_loops(const char *set, uint32_t block, int kind)
{
    static world w;
    static state got, want;
    w.format = (rc_sparse_format){CHUNK, block, 3, RC_F32};
    start(&got);
    want = got;
    for (uint32_t number = 1; number <= STEPS; number++) {
        uint32_t far = 97 * number; /* so that some units were touched long ago */
        rc_sparse_sgd_step sgd = {0.1F, 0.9F, kind == 1 ? 0.01F : 0.0F, kind == 2, far};
        rc_sparse_adam_step adam = {0.01, 0.9, 0.999, 1e-8, 0.1, kind == 4, number};
        draw_units(&w);
        if (kind < 3) {
            CHECK_EQ(rc_sparse_sgd(&w.format, set, &w.entries, &sgd, got.weights, COUNT, got.first,
                                   got.last),
                     RC_OK);
            slow_sgd(&w, &sgd, &want);
        } else {
            CHECK_EQ(rc_sparse_adam(&w.format, set, &w.entries, &adam, got.weights, COUNT,
                                    got.first, got.second),
                     RC_OK);
            slow_adam(&w, &adam, &want);
        }
    }
    if (!CHECK(memcmp(&got, &want, sizeof got) == 0))
        CHECK_NOTE("set %s, blocks of %u, kind %d\n", set, block, kind);
}

static void all_steps(void)
{
    int at = 0;
    for (const char *set = sparse_set(&at); set != NULL; set = sparse_set(&at))
        for (uint32_t block = 1; block <= 16; block += 15)
            for (int kind = 0; kind < 5; kind++)
                steps_are_those_of_plain_loops(set, block, kind);
}

static void sgd_without_momentum_needs_no_memory(void)
{
    static world w;
    static state x;
    w.format = (rc_sparse_format){CHUNK, 16, 3, RC_F32};
    start(&x);
    draw_units(&w);
    rc_sparse_sgd_step step = {0.5F, 0.0F, 0.0F, 0, 1};
    float before = x.weights[w.unit[1] * 16 + 2];
    CHECK_EQ(rc_sparse_sgd(&w.format, NULL, &w.entries, &step, x.weights, COUNT, NULL, NULL),
             RC_OK);
    CHECK(x.weights[w.unit[1] * 16 + 2] == before - 0.5F * w.values[16 + 2]);
    step.momentum = 0.9F;
    CHECK_EQ(rc_sparse_sgd(&w.format, NULL, &w.entries, &step, x.weights, COUNT, NULL, NULL),
             RC_INVALID_ARGUMENT);
}

static void units_are_taken_and_put(void)
{
    static world w;
    static state x;
    static float floats[COUNT];
    static uint16_t halves[COUNT];
    for (uint32_t block = 1; block <= 16; block += 15) {
        w.format = (rc_sparse_format){CHUNK, block, 3, RC_F32};
        start(&x);
        draw_units(&w);
        memset(floats, 0, sizeof floats);
        memset(halves, 0, sizeof halves);
        CHECK_EQ(rc_sparse_take(&w.format, &w.entries, x.weights, COUNT), RC_OK);
        CHECK_EQ(rc_sparse_put(&w.format, NULL, &w.entries, floats, RC_F32, COUNT), RC_OK);
        CHECK_EQ(rc_sparse_put(&w.format, NULL, &w.entries, halves, RC_BF16, COUNT), RC_OK);
        CHECK_EQ(rc_sparse_put(&w.format, NULL, &w.entries, halves, RC_F16, COUNT),
                 RC_INVALID_ARGUMENT);
        for (size_t i = 0, u = 0; i < COUNT; i++) {
            while (u < w.units && (w.unit[u] + 1) * block <= i)
                u++;
            int there = u < w.units && w.unit[u] * block <= i;
            uint16_t half;
            kernels_at(0)->bf16.encode(&half, &x.weights[i], 1.0F, 1);
            CHECK(floats[i] == (there ? x.weights[i] : 0.0F));
            CHECK_EQ(halves[i], there ? half : 0);
        }
    }
}

int main(void)
{
    const check_test tests[] = {
        {"steps are those of plain loops", all_steps},
        {"SGD without momentum needs no memory", sgd_without_momentum_needs_no_memory},
        {"units are taken and put", units_are_taken_and_put},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

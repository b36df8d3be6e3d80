/* gated.c - see gated.h. */
#include "gated.h"

#include "../base/error.h"
#include "joined.h"
#include "one_shot.h"
#include "quantised.h"

/* A reduction under the lock takes a tenth of a millisecond. */
enum { UNITS_AT_ONCE = 4 };

/* What came in a ring before this rank's values were there. */
static rc_result go_on_with_held(rc_work *w, uint32_t chunk, uint32_t segment)
{
    uint32_t n = (uint32_t)w->plan.world_size, rank = (uint32_t)w->plan.rank;
    pool_buffer *buffer = gate_held(w->gate, chunk, segment);
    if (buffer == NULL)
        return RC_OK;
    frame_header h = {
        .chunk = chunk, .segment = segment, .step = (uint16_t)((rank + n - chunk - 1) % n)};
    return work_reduce(w, &h, buffer);
}

/* A unit of the source is there. */
static rc_result open_unit(rc_work *w, uint32_t part, uint32_t segment)
{
    uint32_t rank = (uint32_t)w->plan.rank;
    if (w->quantised != NULL)
        return quantised_open(w, part, segment);
    switch (w->plan.algorithm) {
    case RC_ONE_SHOT: return one_shot_start_segment(w, segment);
    case RC_DIRECT:
        if (part != rank)
            return work_start_segment(w, rank * (uint32_t)w->plan.world_size + part, segment);
        return joined_left(w, segment);
    default:
        return part == rank ? work_start_segment(w, part, segment)
                            : go_on_with_held(w, part, segment);
    }
}

/* Joins of what was encoded take longer; what only leaves is nothing to do here. */
static int cost_of(const rc_work *w, uint32_t part)
{
    if (w->quantised == NULL)
        return 1;
    return quantised_joins(w, part) ? UNITS_AT_ONCE : 0;
}

static rc_result open_units(rc_work *w)
{
    uint32_t part, segment;
    for (int left = UNITS_AT_ONCE;
         left > 0 && w->env != NULL && gate_next(w->gate, &part, &segment);
         left -= cost_of(w, part))
        RC_TRY(open_unit(w, part, segment));
    return RC_OK;
}

rc_result gated_start(rc_work *w)
{
    RC_TRY(gate_lay_out(w->gate, &w->plan));
    return open_units(w);
}

rc_result gated_go_on(rc_work *w)
{
    const work_env *env = w->env;
    if (!gate_may_open(w->gate))
        return RC_OK;
    RC_TRY(open_units(w));
    work_pump(env);
    return RC_OK;
}

/* ---- what arrives ---- */

int gated_may_store(const rc_work *w, uint32_t chunk, uint32_t segment)
{
    return gate_is_open(w->gate, plan_part(&w->plan, chunk), segment);
}

int gated_holds(rc_work *w, const frame_header *h, pool_buffer *buffer)
{
    uint32_t part = plan_part(&w->plan, h->chunk);
    if (gate_is_open(w->gate, part, h->segment))
        return 0;
    gate_hold(w->gate, part, h->segment, buffer);
    return 1;
}

void gated_final(rc_work *w, uint32_t chunk, uint32_t segment)
{
    if (gate_final(w->gate, plan_part(&w->plan, chunk), segment))
        engine_changed(w->engine);
}

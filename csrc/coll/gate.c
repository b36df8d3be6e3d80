/* gate.c - see gate.h. */
#include "gate.h"

#include <stdlib.h>

enum { BITS = 64 };

gate *gate_create(uint32_t shown, uint64_t least, uint64_t most)
{
    gate *g = calloc(1, sizeof *g);
    if (g == NULL)
        return NULL;
    *g = (gate){.shown_most = shown, .least = least, .most = most};
    if ((g->shown = malloc(((size_t)shown + 1) * sizeof *g->shown)) != NULL)
        return g;
    free(g);
    return NULL;
}

void gate_free(gate *g)
{
    if (g == NULL)
        return;
    free(g->shown);
    free(g->missing);
    free(g->held);
    free(g->final);
    free(g->ready);
    free(g);
}

/* ---- units ---- */

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static order_stretch stretch_of(const gate *g, uint32_t unit)
{
    uint64_t from = unit / g->per_part * g->part_elems;
    uint64_t end = smaller(from + g->part_elems, g->total);
    uint64_t start = from + unit % g->per_part * g->segment_elems;
    return (order_stretch){start, start < end ? smaller(g->segment_elems, end - start) : 0};
}

static uint32_t unit_at(const gate *g, uint64_t elem)
{
    uint64_t within = elem % g->part_elems;
    return (uint32_t)(elem / g->part_elems * g->per_part + within / g->segment_elems);
}

static int is_set(const uint64_t *bits, uint32_t unit)
{
    return bits[unit / BITS] >> unit % BITS & 1;
}

static void set(uint64_t *bits, uint32_t unit)
{
    bits[unit / BITS] |= UINT64_C(1) << unit % BITS;
}

rc_result gate_lay_out(gate *g, const plan *p)
{
    g->per_part = plan_segments(p, 0);
    g->part_elems = p->chunk_elems;
    g->segment_elems = p->segment_elems;
    g->total = g->unfinal = p->total_elems;
    uint32_t units = order_parts(p) * g->per_part, words = units / BITS + 1;
    if (units == 0)
        return RC_INTERNAL;
    g->missing = calloc((size_t)units + 1, sizeof *g->missing);
    g->held = calloc((size_t)units + 1, sizeof(pool_buffer *));
    g->final = calloc(words, sizeof *g->final);
    g->ready = calloc(words, sizeof *g->ready);
    if (g->missing == NULL || g->held == NULL || g->final == NULL || g->ready == NULL)
        return RC_NO_MEMORY;
    g->units = units;
    for (uint32_t unit = 0; unit < units; unit++)
        g->missing[unit] = stretch_of(g, unit).elems;
    return RC_OK;
}

/* ---- the source ---- */

void gate_show(gate *g, order_stretch there)
{
    if (g->shown_count < g->shown_most)
        g->shown[g->shown_count++] = there;
}

int gate_may_open(const gate *g)
{
    return g->units > 0 && g->opened < g->shown_count;
}

/* The next elements that lie in one unit. */
static order_stretch next_shown(gate *g, uint32_t *unit)
{
    order_stretch all = g->shown[g->opened];
    order_stretch rest = {all.start + g->opened_part, all.elems - g->opened_part};
    *unit = unit_at(g, rest.start);
    order_stretch whole = stretch_of(g, *unit);
    rest.elems = smaller(rest.elems, whole.start + whole.elems - rest.start);
    g->opened_part += rest.elems;
    if (g->opened_part == all.elems) {
        g->opened++;
        g->opened_part = 0;
    }
    return rest;
}

int gate_next(gate *g, uint32_t *part, uint32_t *segment)
{
    while (gate_may_open(g)) {
        uint32_t unit;
        uint64_t came = next_shown(g, &unit).elems;
        if ((g->missing[unit] -= came) > 0)
            continue;
        *part = unit / g->per_part;
        *segment = unit % g->per_part;
        return 1;
    }
    return 0;
}

static uint32_t unit_of(const gate *g, uint32_t part, uint32_t segment)
{
    return part * g->per_part + segment;
}

int gate_is_open(const gate *g, uint32_t part, uint32_t segment)
{
    return g->missing[unit_of(g, part, segment)] == 0;
}

void gate_hold(gate *g, uint32_t part, uint32_t segment, pool_buffer *buffer)
{
    g->held[unit_of(g, part, segment)] = buffer;
}

pool_buffer *gate_held(gate *g, uint32_t part, uint32_t segment)
{
    pool_buffer **place = &g->held[unit_of(g, part, segment)], *buffer = *place;
    *place = NULL;
    return buffer;
}

/* ---- the result ---- */

static void make_ready(gate *g, uint32_t unit)
{
    uint64_t elems = stretch_of(g, unit).elems;
    set(g->final, unit);
    set(g->ready, unit);
    g->ready_elems += elems;
    g->unfinal -= elems;
}

int gate_final(gate *g, uint32_t part, uint32_t segment)
{
    make_ready(g, unit_of(g, part, segment));
    uint64_t enough = smaller(g->unfinal, g->most);
    enough = g->unfinal > 0 && enough < g->least ? g->least : enough;
    if (g->ripe || g->ready_elems < enough)
        return 0;
    g->ripe = 1;
    return 1;
}

int gate_take(gate *g, order_stretch *next)
{
    uint32_t unit = 0;
    while (unit < g->units && !is_set(g->ready, unit))
        unit = g->ready[unit / BITS] == 0 ? (unit / BITS + 1) * BITS : unit + 1;
    if (unit >= g->units) {
        g->ripe = 0;
        return 0;
    }
    *next = (order_stretch){stretch_of(g, unit).start, 0};
    for (; unit < g->units && is_set(g->ready, unit); unit++) {
        g->ready[unit / BITS] &= ~(UINT64_C(1) << unit % BITS);
        next->elems += stretch_of(g, unit).elems;
    }
    g->ready_elems -= next->elems;
    return 1;
}

void gate_end(gate *g, pool *buffers, int success)
{
    for (uint32_t unit = 0; unit < g->units; unit++) {
        pool_return(buffers, g->held[unit]);
        g->held[unit] = NULL;
        if (success && !is_set(g->final, unit) && stretch_of(g, unit).elems > 0)
            make_ready(g, unit);
    }
}

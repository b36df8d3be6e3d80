/* operands.c - see operands.h. */
#include "operands.h"

#include <stdlib.h>

rc_result operands_init(operands *o, uint32_t units, uint32_t places, uint32_t missing)
{
    size_t kept = (size_t)units * places;
    *o = (operands){0};
    if (units == 0)
        return RC_OK;
    if ((o->of = calloc(1, units * sizeof *o->of + (kept + places) * sizeof *o->kept)) == NULL)
        return RC_NO_MEMORY;
    o->kept = (pool_buffer **)(void *)(o->of + units);
    o->wires = (const void **)(void *)(o->kept + kept);
    o->units = units;
    o->places = places;
    for (uint32_t unit = 0; unit < units; unit++)
        o->of[unit].missing = missing;
    return RC_OK;
}

void operands_destroy(operands *o, pool *buffers)
{
    for (uint32_t unit = 0; unit < o->units; unit++) {
        pool_return(buffers, o->of[unit].value);
        operands_drop(o, unit, buffers);
    }
    free(o->of); /* and what lies behind */
    *o = (operands){0};
}

static pool_buffer **places_of(const operands *o, uint32_t unit)
{
    return o->kept + (size_t)unit * o->places;
}

void operands_keep(operands *o, uint32_t unit, uint32_t place, pool_buffer *buffer)
{
    places_of(o, unit)[place] = buffer;
}

int operands_count(operands *o, uint32_t unit)
{
    return --o->of[unit].missing == 0;
}

const void *const *operands_wires(operands *o, uint32_t unit)
{
    pool_buffer **kept = places_of(o, unit);
    for (uint32_t place = 0; place < o->places; place++)
        o->wires[place] = kept[place] != NULL ? kept[place]->data : NULL;
    return o->wires;
}

void operands_drop(operands *o, uint32_t unit, pool *buffers)
{
    pool_buffer **kept = places_of(o, unit);
    for (uint32_t place = 0; place < o->places; place++) {
        pool_return(buffers, kept[place]);
        kept[place] = NULL;
    }
}

pool_buffer *operands_next(operands *o, uint32_t unit)
{
    if (o->of[unit].over == o->places)
        return NULL;
    pool_buffer **place = places_of(o, unit) + o->of[unit].over, *buffer = *place;
    *place = NULL;
    return buffer;
}

/* join.c - see join.h. */
#include "join.h"

#include <stdlib.h>

rc_result join_init(join *j, uint32_t segments, int world_size, int expected)
{
    size_t world = (size_t)world_size;
    *j = (join){.world_size = world_size, .segments = segments};
    if (segments == 0)
        return RC_OK;
    j->kept = calloc(segments * world, sizeof *j->kept);
    j->missing = calloc(segments, sizeof *j->missing);
    j->wires = calloc(world, sizeof *j->wires);
    if (j->kept == NULL || j->missing == NULL || j->wires == NULL) {
        join_destroy(j, NULL);
        return RC_NO_MEMORY;
    }
    for (uint32_t segment = 0; segment < segments; segment++)
        j->missing[segment] = expected;
    return RC_OK;
}

void join_destroy(join *j, pool *buffers)
{
    for (uint32_t segment = 0; segment < j->segments && buffers != NULL; segment++)
        join_drop(j, segment, buffers);
    free(j->kept);
    free(j->missing);
    free(j->wires);
    *j = (join){0};
}

static pool_buffer **of_segment(const join *j, uint32_t segment)
{
    return j->kept + (size_t)segment * (size_t)j->world_size;
}

int join_keep(join *j, uint32_t segment, int rank, pool_buffer *buffer)
{
    of_segment(j, segment)[rank] = buffer;
    return --j->missing[segment] == 0;
}

int join_note_event(join *j, uint32_t segment)
{
    return --j->missing[segment] == 0;
}

const void *const *join_wires(join *j, uint32_t segment)
{
    pool_buffer **kept = of_segment(j, segment);
    for (int rank = 0; rank < j->world_size; rank++)
        j->wires[rank] = kept[rank] != NULL ? kept[rank]->data : NULL;
    return j->wires;
}

void join_drop(join *j, uint32_t segment, pool *buffers)
{
    pool_buffer **kept = of_segment(j, segment);
    for (int rank = 0; rank < j->world_size; rank++) {
        pool_return(buffers, kept[rank]);
        kept[rank] = NULL;
    }
}

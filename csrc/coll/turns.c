/* turns.c - see turns.h. */
#include "turns.h"

#include <stdlib.h>

rc_result turns_init(turns *t, uint32_t units, uint32_t most)
{
    *t = (turns){.units = units, .most = most};
    if (units == 0)
        return RC_OK;
    t->of = calloc(units, sizeof *t->of);
    t->kept = calloc((size_t)units * most + 1, sizeof *t->kept);
    if (t->of != NULL && t->kept != NULL)
        return RC_OK;
    free(t->of);
    free(t->kept);
    *t = (turns){0};
    return RC_NO_MEMORY;
}

void turns_destroy(turns *t, pool *buffers)
{
    for (uint32_t unit = 0; unit < t->units; unit++)
        pool_return(buffers, t->of[unit].value);
    for (size_t i = 0; i < (size_t)t->units * t->most; i++)
        pool_return(buffers, t->kept[i]);
    free(t->of);
    free(t->kept);
    *t = (turns){0};
}

static pool_buffer **kept_place(const turns *t, uint32_t unit, uint32_t turn)
{
    return t->kept + (size_t)unit * t->most + turn;
}

void turns_keep(turns *t, uint32_t unit, uint32_t turn, pool_buffer *buffer)
{
    *kept_place(t, unit, turn) = buffer;
}

pool_buffer *turns_next(turns *t, uint32_t unit)
{
    if (t->of[unit].over == t->most)
        return NULL;
    pool_buffer **place = kept_place(t, unit, t->of[unit].over), *buffer = *place;
    *place = NULL;
    return buffer;
}

/* ledger.c - see ledger.h. */
#include "ledger.h"

/* What the roundings of f32 come to; half a code is more. */
static const double TOLERANCE = 0.125;

static uint64_t all_elements(const sim_call *c, int world_size)
{
    return c->call.count * (c->call.collective == RC_ALLREDUCE ? 1 : (uint64_t)world_size);
}

static void open_ledger(ledger *l, uint64_t count)
{
    l->count = count;
    l->given = calloc(count + 1, sizeof *l->given);
    l->got = calloc(count + 1, sizeof *l->got);
    l->left = calloc(count + 1, sizeof *l->left);
    l->now = calloc(count + 1, sizeof *l->now);
    l->is_got = calloc(count + 1, sizeof *l->is_got);
}

void ledger_close(ledger *l)
{
    free(l->given);
    free(l->got);
    free(l->left);
    free(l->now);
    free(l->is_got);
    *l = (ledger){0};
}

/* Returns what a unit of a result is in contributions. */
static double unit_of(const sim_call *c, int world_size)
{
    return c->call.op == RC_AVG && c->call.collective != RC_ALLGATHER ? world_size : 1;
}

static int enter_results(ledger *l, const sim_call *c, uint64_t first, uint64_t count,
                         const void *dst, double unit)
{
    for (uint64_t i = 0; i < count; i++) {
        double value = call_load(dst, c->call.dtype, i);
        if (l->is_got[first + i] && value != l->now[first + i])
            return 0;
        if (!l->is_got[first + i])
            l->got[first + i] += value * unit;
        l->is_got[first + i] = 1;
        l->now[first + i] = value;
    }
    return 1;
}

static void enter_residuals(ledger *l, const rc_feedback *f, uint64_t first, double unit)
{
    for (uint64_t i = 0; i < f->count; i++)
        l->left[first + i] += (double)f->worker[f->now].data[i];
    for (uint64_t i = f->owned.start; i < f->owned.end; i++)
        l->left[i] += (double)f->owner[f->now][i - f->owned.start] * unit;
}

static const char *close_round(ledger *l, const sim_call *c, int world_size)
{
    int gathers = c->call.collective == RC_ALLGATHER;
    const char *wrong = NULL;
    for (uint64_t i = 0; i < l->count; i++) {
        for (int rank = 0; rank < world_size; rank++)
            if (!gathers || i / c->call.count == (uint64_t)rank)
                l->given[i] += (double)call_value(c, rank, gathers ? i % c->call.count : i);
        if (!(fabs(l->given[i] - l->got[i] - l->left[i]) <= TOLERANCE))
            wrong = "what was given is not what was got and what is left";
        l->left[i] = 0;
        l->is_got[i] = 0;
    }
    l->ends = 0;
    return wrong;
}

const char *ledger_enter(ledger *l, const sim_call *c, int rank, int world_size, const void *dst,
                         const rc_feedback *residuals)
{
    double unit = unit_of(c, world_size);
    uint64_t count = c->call.count, part = (uint64_t)rank * count;
    int gathers = c->call.collective == RC_ALLGATHER;
    if (l->given == NULL)
        open_ledger(l, all_elements(c, world_size));
    int scatters = c->call.collective == RC_REDUCE_SCATTER;
    if (!enter_results(l, c, scatters ? part : 0, scatters ? count : l->count, dst, unit))
        return "two ranks have different results";
    enter_residuals(l, residuals, gathers ? part : 0, unit);
    return ++l->ends == world_size ? close_round(l, c, world_size) : NULL;
}

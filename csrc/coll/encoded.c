/* encoded.c - the layout (rc_layout) of all-reduces whose source and result are encoded already.
 * See work.h.
 *
 * A GPU that packs a tensor must know which elements a payload holds. The plan decides that, the
 * same on all ranks, so it is known before there is a work.
 *
 *   parts 0 .. n-1, each with its segments' payloads       float32
 *   | 0 1 2 .. | 0 1 2 .. | (own) | 0 1 2 .. |             | own part |      direct
 *
 *   one part of each rank
 *   | 0 1 2 .. | 0 1 2 .. |                                                  one-shot
 *
 * Contributions to other ranks' parts are encoded; the one to this rank's own part is added as it
 * is, so it lies behind them as float32. When the work is over each payload is that of the result,
 * the own part's too. Among two ranks each adds for itself, on the GPU where that packs: when the
 * work is over both contributions lie there as they came. The core still finds out whether the sum
 * has a value that is not finite (quantised_poisoned): then all of the result is NaN.
 *
 * There is no error feedback here: residuals are in host memory, where tensors with feedback are
 * encoded.
 */
#include "work.h"

enum { ALIGNMENT = 64 };

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

int encoded_suits(const rc_call *call, const work_env *env)
{
    return call->collective == RC_ALLREDUCE && call->dtype == RC_F32 && plan_quantises(call) &&
           call->codec < RC_CODEC_COUNT && call->feedback == NULL && env->world_size > 1;
}

/* Returns the bytes of a part's payloads. */
static uint64_t bytes_of_part(const quant *q, const plan *p, uint64_t segment_bytes)
{
    uint32_t segments = plan_segments(p, 0);
    if (segments == 0)
        return 0;
    return (segments - 1) * segment_bytes +
           aligned(quant_bytes(q, plan_segment_elems(p, 0, segments - 1)));
}

void encoded_layout(rc_layout *out, const work_env *env, const rc_call *call)
{
    plan p;
    quant q;
    quant_init(&q, env->engine->kernels, call, env->contributors);
    plan_init(&p, call, plan_choose(call, env->world_size, 0, 0, RC_AUTO), env->rank,
              env->world_size, quant_segment(&q, env->segment_bytes));
    int has_part = plan_joins(&p) == PLAN_JOINS_ITS_PART;
    uint64_t start = has_part ? plan_src_offset(&p, (uint32_t)p.rank) : 0;
    *out = (rc_layout){.parts = has_part ? (uint64_t)p.world_size : 1,
                       .terms = has_part ? 1 : (uint64_t)p.world_size,
                       .part_elems = p.chunk_elems,
                       .segment_elems = p.segment_elems,
                       .segment_bytes = aligned(quant_bytes(&q, p.segment_elems)),
                       .own = has_part ? p.rank : -1,
                       .plain_start = start < call->count ? start : call->count,
                       .plain_count = has_part ? plan_chunk_elems(&p, (uint32_t)p.rank) : 0};
    out->part_bytes = bytes_of_part(&q, &p, out->segment_bytes);
    out->plain = out->terms * out->parts * out->part_bytes;
    out->bytes = out->plain + out->plain_count * sizeof(float);
}

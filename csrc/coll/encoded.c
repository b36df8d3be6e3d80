/* encoded.c - see encoded.h. */
#include "encoded.h"

#include "../plan/fingerprint.h"

enum { ALIGNMENT = 64 };

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

int encoded_suits(const rc_call *call, const work_env *env)
{
    return call->collective == RC_ALLREDUCE && call->dtype == RC_F32 &&
           call->codec >= RC_CODEC_INT8 && call->codec <= RC_CODEC_TOPK && env->world_size > 1 &&
           (call->codec != RC_CODEC_TOPK || (call->density > 0.0 && call->density <= 1.0));
}

/* Of a part's payloads. */
static uint64_t bytes_of_part(const quant *q, const plan *p, uint64_t segment_bytes)
{
    uint32_t segments = plan_segments(p, 0);
    if (segments == 0)
        return 0;
    return (segments - 1) * segment_bytes +
           aligned(quant_most_bytes(q, plan_segment_elems(p, 0, segments - 1)));
}

/* What follows plain_start. Two contributions have their room each, and so does what is added. */
static void lay_out_topk(rc_layout *l, const topk *t, const plan *p, size_t wire)
{
    size_t n = plan_segment_elems(p, 0, 0);
    uint64_t contribution = aligned(topk_most_contributed(t, wire, n) * TOPK_BYTES);
    uint64_t sum = aligned(topk_most_of_sum(t, wire, n) * TOPK_BYTES);
    int is_direct = l->own >= 0;
    if (is_direct)
        l->segment_bytes = contribution > sum ? contribution : sum;
    else
        l->segment_bytes = 2 * contribution;
    l->terms = 1;
    l->part_bytes = plan_segments(p, 0) * l->segment_bytes;
    l->plain = l->parts * l->part_bytes;
    l->result = is_direct ? 0 : l->plain;
    l->counts = aligned(l->plain + (is_direct ? l->plain_count * sizeof(float) : l->part_bytes));
    l->bytes = l->counts + 2 * encoded_segments(l) * sizeof(uint32_t);
}

uint64_t encoded_segments(const rc_layout *l)
{
    return l->part_bytes == 0 ? 0 : l->parts * (l->part_bytes / l->segment_bytes);
}

uint32_t *encoded_count(const rc_layout *l, void *memory, uint64_t part, uint64_t segment,
                        int of_result)
{
    uint32_t *counts = (uint32_t *)(void *)((uint8_t *)memory + l->counts);
    uint64_t first = of_result ? encoded_segments(l) : 0;
    return counts + first + part * (l->part_bytes / l->segment_bytes) + segment;
}

uint64_t encoded_most(const rc_layout *l)
{
    return l->result > 0 ? l->segment_bytes / 2 : l->segment_bytes;
}

void encoded_plan(plan *out, quant *codec, const work_env *env, const rc_call *call)
{
    rc_call rounded = *call;
    rounded.density = fingerprint_density(fingerprint_of(call));
    quant_init(codec, env->engine->kernels, &rounded, env->contributors);
    plan_init(out, call, plan_choose(call, env->world_size, 0, RC_AUTO), env->rank, env->world_size,
              quant_segment(codec, env->segment_bytes));
}

void encoded_layout(rc_layout *out, const work_env *env, const rc_call *call)
{
    plan p;
    quant q;
    encoded_plan(&p, &q, env, call);
    int is_direct = p.algorithm == RC_DIRECT;
    uint64_t start = is_direct ? plan_src_offset(&p, (uint32_t)p.rank) : 0;
    *out = (rc_layout){.parts = is_direct ? (uint64_t)p.world_size : 1,
                       .terms = is_direct ? 1 : (uint64_t)p.world_size,
                       .part_elems = p.chunk_elems,
                       .segment_elems = p.segment_elems,
                       .segment_bytes = aligned(quant_most_bytes(&q, p.segment_elems)),
                       .own = is_direct ? p.rank : -1,
                       .plain_start = start < call->count ? start : call->count,
                       .plain_count = is_direct ? plan_chunk_elems(&p, (uint32_t)p.rank) : 0};
    if (call->codec == RC_CODEC_TOPK) {
        lay_out_topk(out, &q.topk, &p, env->segment_bytes);
        return;
    }
    out->part_bytes = bytes_of_part(&q, &p, out->segment_bytes);
    out->plain = out->terms * out->parts * out->part_bytes;
    out->bytes = out->plain + out->plain_count * sizeof(float);
}

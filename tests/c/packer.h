/* packer.h - what a GPU does for a quantising codec, done by the CPU: packs a tensor into the
 * memory of a call that is encoded already, and unpacks the result. For tests of the core's side of
 * it.
 */
#ifndef RINGCOMM_TEST_PACKER_H
#define RINGCOMM_TEST_PACKER_H

#include "world.h"

typedef struct packer {
    rc_comm *comm;
    rc_call call; /* of the tensor, as it is */
    rc_layout layout;
    quant codec;
    uint8_t *memory;
} packer;

static inline packer packer_open(rc_comm *comm, const rc_call *call)
{
    packer p = {.comm = comm, .call = *call};
    CHECK_EQ(rc_comm_layout(comm, call, &p.layout), RC_OK);
    p.memory = calloc(1, p.layout.bytes + 1);
    quant_init(&p.codec, comm->engine->kernels, call, comm->env.contributors);
    return p;
}

static inline void packer_close(packer *p)
{
    free(p->memory);
}

/* Elements of a segment; *start: where they are in the tensor. 0 for none. */
static inline uint64_t packer_segment(const packer *p, uint64_t part, uint64_t segment,
                                      uint64_t *start)
{
    const rc_layout *l = &p->layout;
    uint64_t end = (part + 1) * l->part_elems;
    end = end < p->call.count ? end : p->call.count;
    *start = part * l->part_elems + segment * l->segment_elems;
    if (*start >= end)
        return 0;
    return end - *start < l->segment_elems ? end - *start : l->segment_elems;
}

static inline uint8_t *packer_payload(const packer *p, uint64_t part, uint64_t segment)
{
    return p->memory + part * p->layout.part_bytes + segment * p->layout.segment_bytes;
}

/* Of this rank's contribution. */
static inline uint8_t *packer_own(const packer *p, uint64_t part, uint64_t segment)
{
    return packer_payload(p, p->layout.terms == 2 ? (uint64_t)p->comm->env.rank : part, segment);
}

/* As the call to submit. */
static inline rc_call packer_pack(packer *p)
{
    int ignored = 0;
    uint64_t start, n;
    const rc_layout *l = &p->layout;
    const float *src = p->call.src;
    for (uint64_t part = 0; part < l->parts; part++)
        for (uint64_t k = 0; (n = packer_segment(p, part, k, &start)) > 0; k++)
            if ((int64_t)part != l->own)
                quant_encode(&p->codec, packer_own(p, part, k), src + start, NULL, NULL, n,
                             &ignored);
    float *plain = (float *)(void *)(p->memory + l->plain);
    for (uint64_t i = 0; i < l->plain_count && l->own >= 0; i++)
        plain[i] = src[l->plain_start + i];
    rc_call call = p->call;
    call.src = call.dst = p->memory;
    call.encoded = 1;
    return call;
}

/* Of two ranks' contributions. */
static inline void packer_join(packer *p, uint64_t segment, float *dst, uint64_t n, int *poisoned)
{
    const void *wires[] = {packer_payload(p, 0, segment), packer_payload(p, 1, segment)};
    quant_join(&p->codec, dst, &(quant_terms){.wires = wires, .count = 2}, n, poisoned);
}

/* Of a work that was a success. */
static inline void packer_unpack(packer *p, const rc_work *w)
{
    int poisoned = 0;
    uint64_t start, n;
    const rc_layout *l = &p->layout;
    float *dst = p->call.dst;
    for (uint64_t part = 0; part < l->parts; part++)
        for (uint64_t k = 0; (n = packer_segment(p, part, k, &start)) > 0; k++)
            if (l->terms == 2)
                packer_join(p, k, dst + start, n, &poisoned);
            else
                quant_store(&p->codec, dst + start, packer_payload(p, part, k), n, &poisoned);
    CHECK_EQ(poisoned, quantised_poisoned(w));
    if (quantised_poisoned(w))
        quant_fill_nan(RC_F32, dst, p->call.count);
}

#endif

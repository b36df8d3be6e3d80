/* packed.c - see packed.h. */
#include "packed.h"

#include "../c/packer.h"

struct packed {
    packer packer;
    rc_call call;  /* as the caller made it */
    uint8_t *bits; /* of 16 each; NULL: the packer's */
};

static const kernel_half *half_of(const rc_call *call)
{
    return call->codec == RC_CODEC_FP16 ? &kernels_at(0)->fp16 : &kernels_at(0)->bf16;
}

packed *packed_make(rc_comm *comm, rc_call *call)
{
    packed *p = calloc(1, sizeof *p);
    p->call = *call;
    if (call->codec > RC_CODEC_FP16) {
        p->packer = packer_open(comm, call);
        *call = packer_pack(&p->packer);
        return p;
    }
    int divides = call->codec == RC_CODEC_FP16 && call->op == RC_AVG;
    float factor = divides ? 1.0F / (float)comm->env.world_size : 1.0F;
    p->bits = malloc(call->count * sizeof(uint16_t) + 1);
    half_of(call)->encode((uint16_t *)(void *)p->bits, call->src, factor, call->count);
    call->src = call->dst = p->bits;
    call->encoded = 1;
    return p;
}

void packed_take_result(packed *p, const rc_work *w)
{
    if (p->bits != NULL)
        half_of(&p->call)->decode(p->call.dst, (const uint16_t *)(const void *)p->bits,
                                  p->call.count);
    else
        packer_unpack(&p->packer, w);
}

void packed_free(packed *p)
{
    if (p != NULL) {
        packer_close(&p->packer);
        free(p->bits);
    }
    free(p);
}

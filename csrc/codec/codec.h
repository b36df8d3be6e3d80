/* codec.h - how elements travel, and how they are reduced on the way.
 *
 * A codec ties together what a call asks for (dtype, op, compression) with the kernels that do it.
 * The wire holds either the tensor's own bits ("plain") or 16-bit floats. Sums of 16-bit floats
 * are made in f32 and rounded once per hop. What a rank contributes is always what it would send,
 * so that a tensor may as well have been encoded elsewhere before (x = D(E(src * pre))):
 *
 *   first hop   wire = E(src * pre)
 *   reduce hop  wire = E(D(wire) op x)          in f32
 *   last hop    wire = E((D(wire) op x) * post) in f32, by the chunk's owner
 *   store       dst  = D(wire)                  also by the owner, of its own encoding
 *
 * Where all ranks' contributions meet in one place, they are joined there in order of rank:
 *
 *   contribution   wire = E(src * pre)                of every rank, this one too
 *   join           wire = E((D(wire 0) op D(wire 1) op ...) * post), in f32; stored, too
 *
 * Where ranks exchange sums, both make the next one from the same encodings:
 *
 *   combine        wire = E(D(wire a) op D(wire b))       in f32, * post before E if it is the last
 *
 * So a tensor that travels by 16 bits has the result that a tensor of these 16 bits would have,
 * whatever the plan. Every NaN that a join or the last combine of plain f32 or f64 leaves is the
 * same one (NAN of math.h).
 *
 * An average is a sum times 1/world_size: by `pre` on every rank for fp16, whose range the sum
 * could leave, by `post` at the owner for everything else. Integers are divided by the owner.
 *
 * Pure: no state beyond the struct, no OS, no allocation. n may be 0.
 */
#ifndef RINGCOMM_CODEC_H
#define RINGCOMM_CODEC_H

#include <stddef.h>

#include "../include/ringcomm.h"
#include "../kernels/kernels.h"

typedef struct codec {
    const kernel_set *kernels;
    const kernel_half *half; /* the wire's 16-bit format; NULL if the wire holds the dtype's bits */
    rc_dtype dtype;
    rc_op op;          /* RC_SUM in place of RC_AVG */
    float pre;         /* of 16-bit wires, before the first encoding */
    float post;        /* of 16-bit wires, before the last encoding */
    double plain_post; /* of other wires: factor, or divisor for integers; 0: none */
    size_t elem_bytes; /* of one element in memory */
    size_t wire_bytes; /* of one element on the wire */
} codec;

/* Turns a call whose data is encoded in 16 bits already into that of a tensor of 16-bit floats,
 * which has the same bits on the wire; leaves other calls as they are. */
void codec_take_encoded(rc_call *call);
/* Prepares the codec of a call, whose dtype and codec must go together (codec_supports). */
void codec_init(codec *c, const kernel_set *kernels, const rc_call *call, int world_size);
/* Leaves the scaling of an average to another codec, which reduces this one's result further. */
void codec_leave_unfinished(codec *c);
/* Returns 1 if tensors of dtype can travel by this codec. */
int codec_supports(rc_codec id, rc_dtype dtype);

/* Returns 1 if the first hop may send src as it lies in memory. */
int codec_sends_plain(const codec *c);
/* Returns 1 if what arrives may be received straight into dst. */
int codec_stores_plain(const codec *c);

/* wire = E(src * pre). */
void codec_encode(const codec *c, void *wire, const void *src, size_t n);
/* out = wire op src; out may be wire, or with a plain store dst. last: the owner's hop. */
void codec_reduce(const codec *c, void *out, const void *wire, const void *src, size_t n, int last);
/* out = first op second, all three as they travel; out may be first or second. last: out is the sum
 * of all. */
void codec_combine(const codec *c, void *out, const void *first, const void *second, size_t n,
                   int last);
/* out = the joined contributions of all ranks: elements of the tensor, or (encoded) a result as it
 * travels. wires[rank]: the contribution as it came; NULL for this rank's own, which is made from
 * src. out may be src. */
void codec_join(const codec *c, void *out, int encoded, const void *const wires[], int world_size,
                const void *src, size_t n);
/* dst = D(wire). */
void codec_store(const codec *c, void *dst, const void *wire, size_t n);

#endif

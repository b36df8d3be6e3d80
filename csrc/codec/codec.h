/* codec.h - how elements travel, and how they are reduced on the way. The interface of codec/ to
 * other folders.
 *
 * A call (dtype, op, compression) has one of two kinds of codec: `codec` for the tensor's own bits
 * and 16-bit floats (codec.c), `quant` for few bits per element (quant.c).
 *
 * Pure: no state beyond the structs, no OS, no allocation. Any thread may call. n may be 0.
 */
#ifndef RINGCOMM_CODEC_H
#define RINGCOMM_CODEC_H

#include <stddef.h>

#include "../include/ringcomm.h"
#include "../kernels/kernels.h"

/* ---- the tensor's own bits ("plain"), and 16-bit floats ----
 *
 * Sums of 16-bit floats are made in f32 and rounded once per hop. A rank contributes what it would
 * send, so a tensor may as well have been encoded elsewhere before (x = D(E(src * pre))):
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
 */
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

/* ---- few bits per element, a segment at a time ----
 *
 * Elements share a scale in blocks (kernel_block). The payload of a segment of n elements holds the
 * scales of its blocks, then their codes:
 *
 *   | scales: bf16[blocks] | codes |
 *
 * C stands for encoding, D for decoding, a residual e for what an earlier call lost; all in f32.
 *
 *   contribution   wire = C(x + e), e' = (x + e) - D(wire)
 *   sum            S = D(wire 0) + D(wire 1) + ...        in order of rank; a rank's own
 *                                                          contribution may be x + e, not encoded
 *   result         wire = C(S * post + e), e' = (S * post + e) - D(wire), dst = D(wire)
 *             or   dst = S * post                          where nobody else needs it
 *
 * A tensor of f64 is rounded to f32 first. post is 1/world_size for an average, else 1.
 *
 * A value that is not finite poisons its block: D is NaN there. Encoding and decoding report such a
 * block, so that all ranks can make the whole result NaN and keep their residuals.
 *
 * Data is processed in pieces that stay in the first cache; memory is read once and written once.
 */
typedef struct quant {
    const kernel_set *kernels;
    const kernel_block *format;
    rc_dtype dtype; /* RC_F32 or RC_F64 */
    size_t elem_bytes;
    float post;
    int far; /* the tensor is more than a cache holds */
} quant;

/* Prepares the codec of a call. contributors: the ranks whose values are in a result. */
void quant_init(quant *q, const kernel_set *kernels, const rc_call *call, int contributors);

/* Returns the bytes of a segment's payload. */
size_t quant_bytes(const quant *q, size_t n);
/* Returns the elements of the largest segment whose payload fits into so many bytes; a multiple of
 * PLAN_ALIGN.
 */
size_t quant_segment(const quant *q, size_t bytes);

/* Encodes a contribution. residual: e, or NULL for 0; left: e', or NULL if it is not wanted; the
 * two are the same memory or do not overlap. Sets *poisoned if a value is not finite, else leaves
 * it. */
void quant_encode(const quant *q, uint8_t *wire, const void *src, const float *residual,
                  float *left, size_t n, int *poisoned);

/* Terms of a sum: wires[rank] is a rank's contribution as it came; NULL for this rank's own, which
 * is src + residual (NULL: 0). */
typedef struct quant_terms {
    const void *const *wires;
    int count;
    const void *src;
    const float *residual;
} quant_terms;

/* dst = S * post; dst may be src. */
void quant_join(const quant *q, void *dst, const quant_terms *terms, size_t n, int *poisoned);
/* Encodes the result for the others and decodes it to dst, which may be src, or NULL where no
 * decoded result is wanted. residual and left as in quant_encode. */
void quant_join_encoded(const quant *q, void *dst, uint8_t *wire, const quant_terms *terms,
                        const float *residual, float *left, size_t n, int *poisoned);

/* Returns 1 if quant_join of contributions that are all encoded would find a value that is not
 * finite. Looks at the scales, and at the sum where they are so large that it might overflow. */
int quant_sum_is_poisoned(const quant *q, const quant_terms *terms, size_t n);

/* dst = D(wire). */
void quant_store(const quant *q, void *dst, const uint8_t *wire, size_t n, int *poisoned);

/* Returns 1 if quant_store would find a poisoned block. */
int quant_is_poisoned(const quant *q, const uint8_t *wire, size_t n);

/* Returns 1 if n elements are neither NaN nor infinite. */
int quant_is_finite(rc_dtype dtype, const void *x, size_t n);
/* dst = NaN. */
void quant_fill_nan(rc_dtype dtype, void *dst, size_t n);

#endif

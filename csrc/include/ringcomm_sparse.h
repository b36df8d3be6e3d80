/* ringcomm_sparse.h - the C interface of sparse exchanges: the largest elements of each chunk of a
 * tensor, as bytes that collectives carry, and the sum of such payloads. No function here
 * communicates; none keeps anything between calls.
 *
 * As in ringcomm.h, the part between the markers is the one that cffi declares.
 */
#ifndef RINGCOMM_SPARSE_H
#define RINGCOMM_SPARSE_H

#include <stdint.h>

#include "ringcomm.h"

/* -- begin declarations -- */

/* ---- sparse payloads ---- */

/* A tensor is cut into chunks, the last of which may be short. Of every chunk a fixed number of
 * units is sent, so that the size of a payload follows from the count alone. A unit is an element,
 * or a block of 16 neighbours that are sent together. */
typedef struct rc_sparse_format {
    uint32_t chunk;  /* elements: 16 to 65536, a multiple of block */
    uint32_t block;  /* elements of a unit: 1 or 16 */
    uint32_t kept;   /* units of a whole chunk, at most all of them; of a short one its share */
    rc_dtype values; /* RC_F32 or RC_BF16 */
} rc_sparse_format;

/* Units of a tensor, as received: counts[i] units of chunk i, in ascending order; index is a unit's
 * place in its chunk, and values its elements. */
typedef struct rc_sparse_entries {
    uint32_t *counts;
    uint16_t *index;
    float *values;
} rc_sparse_entries;

/* Return the bytes of the record of a whole chunk, and of the payload of count elements; 0 for an
 * invalid format. */
uint64_t rc_sparse_record_bytes(const rc_sparse_format *format);
uint64_t rc_sparse_bytes(const rc_sparse_format *format, uint64_t count);
/* Returns the most units that a sum of so many payloads has. */
uint64_t rc_sparse_most(const rc_sparse_format *format, uint64_t count, int payloads);

/* Selects the units that are sent. c = residual * decay + delta, residual NULL being 0; the units
 * of c with the largest magnitude (of a block the sum of them) go to wire, rounded as the payload
 * has them, and left = c less what was sent. Of equals the first go; where too few elements are not
 * zero, zeros go as well. left may be residual or delta. *poisoned is 1 if a value that is sent is
 * not finite: left is void then. kernel_set: as in rc_engine_create. The result is the same with
 * every set. */
rc_result rc_sparse_select(const rc_sparse_format *format, const char *kernel_set, uint8_t *wire,
                           float *left, const float *residual, const float *delta, float decay,
                           uint64_t count, int *poisoned);

/* Sums payloads, in the order of wires, times factor; factor 0: divides each unit by how many of
 * the payloads have it. A unit whose values are all zero counts as not sent. out has room for
 * rc_sparse_most. *poisoned is 1 if a value or a sum is not finite: out is void then. Returns
 * RC_PROTOCOL if payload *wrong is not of this format. */
rc_result rc_sparse_join(const rc_sparse_format *format, const char *kernel_set,
                         const uint8_t *const *wires, int payloads, float factor, uint64_t count,
                         rc_sparse_entries *out, uint64_t *total, int *poisoned, int *wrong);

/* Write entries to dense, with zeros elsewhere; and add factor * entries to dense. */
rc_result rc_sparse_scatter(const rc_sparse_format *format, const char *kernel_set,
                            const rc_sparse_entries *entries, float *dense, uint64_t count);
rc_result rc_sparse_add(const rc_sparse_format *format, const rc_sparse_entries *entries,
                        float factor, float *dense, uint64_t count);

/* ---- optimizer steps of received units ---- */

typedef struct rc_sparse_sgd_step {
    float lr, momentum, weight_decay;
    int32_t nesterov;
    uint32_t number; /* of the step, from 1 on */
} rc_sparse_sgd_step;

typedef struct rc_sparse_adam_step {
    double lr, beta1, beta2, eps, weight_decay;
    int32_t decoupled; /* weight decay as AdamW has it */
    uint32_t number;
} rc_sparse_adam_step;

/* Take one step for the units of entries; all others stay as they are, weights and states. A part
 * of a tensor that begins with a chunk is a tensor, too: so several threads can share a step.
 *
 * sgd: the momentum of a unit that was last touched k steps ago is multiplied by momentum^k first.
 * last: for each unit of the tensor the number of the step that touched it last, 0 at first.
 * buffer and last are NULL where momentum is 0.
 * adam: moments of other units do not decay, whatever the number of the step. */
rc_result rc_sparse_sgd(const rc_sparse_format *format, const char *kernel_set,
                        const rc_sparse_entries *entries, const rc_sparse_sgd_step *step,
                        float *weights, uint64_t count, float *buffer, uint32_t *last);
rc_result rc_sparse_adam(const rc_sparse_format *format, const char *kernel_set,
                         const rc_sparse_entries *entries, const rc_sparse_adam_step *step,
                         float *weights, uint64_t count, float *first, float *second);

/* Copy the units of entries: their values from dense, and their values to dense, of RC_F32 or
 * RC_BF16. entries has their places. */
rc_result rc_sparse_take(const rc_sparse_format *format, const rc_sparse_entries *entries,
                         const float *dense, uint64_t count);
rc_result rc_sparse_put(const rc_sparse_format *format, const char *kernel_set,
                        const rc_sparse_entries *entries, void *dense, rc_dtype dtype,
                        uint64_t count);

/* -- end declarations -- */

#endif

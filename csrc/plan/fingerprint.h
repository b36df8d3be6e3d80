/* fingerprint.h - a whole call in 64 bits.
 *
 * Every frame carries the fingerprint of the collective it belongs to, so that ranks which called
 * different things find out from the first frame, and both can name both calls. It is a packing,
 * not a hash: fingerprints that match mean equal calls.
 *
 *   bits  0-3 collective   4-7 op   8-11 dtype   12-15 codec   16-27 root   28-63 count
 *
 * Collectives without a root have their caller in bits 16-27, for messages: the call of the library
 * that they are part of.
 *
 * Pure: no state, no OS.
 */
#ifndef RINGCOMM_FINGERPRINT_H
#define RINGCOMM_FINGERPRINT_H

#include <stddef.h>
#include <stdint.h>

#include "../include/ringcomm.h"

#define FINGERPRINT_MAX_COUNT ((UINT64_C(1) << 36) - 1)
#define FINGERPRINT_MAX_ROOT 4095
#define FINGERPRINT_TEXT 128
#define FINGERPRINT_ADVICE "all ranks must make the same calls in the same order"

/* Packs a call, which must have been validated. Arguments that the collective ignores are packed as
 * 0; a send and the receive it meets have the same fingerprint. */
uint64_t fingerprint_of(const rc_call *call);
/* Returns 1 for equal calls, whoever their callers are. */
int fingerprint_matches(uint64_t one, uint64_t other);
/* Returns the op of the call; RC_SUM where the collective ignores it. */
rc_op fingerprint_op(uint64_t fingerprint);
/* Writes the call as text: "allreduce(f32[1024], op=sum, compression=bf16)", "allgather(u8[32]) in
 * gather_state_dict()". Any 64 bits give some text, of less than FINGERPRINT_TEXT bytes. */
void fingerprint_text(uint64_t fingerprint, char *text, size_t size);

#endif

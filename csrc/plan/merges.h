/* merges.h - the numbering of chunks in plans that merge; for plan.c.
 *
 *   doubling   a * n + b           what a has when it meets b
 *   halving    q * n + r           what rank r has of part q, to its parent in the part's tree
 *              n * n + q * n + r   the result of part q, from there to rank r
 *
 * Other numbers are chunks of no hops. Pure: no state, no OS, no allocation.
 */
#ifndef RINGCOMM_MERGES_H
#define RINGCOMM_MERGES_H

#include "plan.h"

/* Writes the chunk's sender and receiver; equal ones where the chunk does not exist. */
void merges_ends(const plan *p, uint32_t chunk, int *from, int *to);
/* Return 1 if the chunk carries a result, and if it is there from the beginning; for chunks that
 * exist. */
int merges_brings_result(const plan *p, uint32_t chunk);
int merges_is_given(const plan *p, uint32_t chunk);
/* Counts the meetings of this rank over a part, with a peer or with all (-1). Each pair sends one
 * chunk either way. */
uint32_t merges_meetings(const plan *p, uint32_t part, int peer);

#endif

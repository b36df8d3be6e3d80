/* ledger.h - the account of what calls lose that feed residuals back: over all calls so far, what
 * the ranks gave is what they got and what their residuals hold.
 */
#ifndef RINGCOMM_SIM_LEDGER_H
#define RINGCOMM_SIM_LEDGER_H

#include "../../csrc/coll/feedback.h"
#include "calls.h"

/* An account of a group; all zero at first. A call is over on all ranks before the next begins on
 * any, as each takes the same residuals. */
typedef struct ledger {
    uint64_t count;                   /* elements of all ranks together */
    double *given, *got, *left, *now; /* now: this call's results */
    uint8_t *is_got;
    int ends; /* ranks on which this call is over */
} ledger;

/* Enters the end of a call on a rank. Returns NULL, or what is wrong. */
const char *ledger_enter(ledger *l, const sim_call *c, int rank, int world_size, const void *dst,
                         const rc_feedback *residuals);
void ledger_close(ledger *l);

#endif

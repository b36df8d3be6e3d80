/* encoded.h - all-reduces that are given, and give, what is encoded already: where it lies
 * (rc_layout).
 *
 * Who packs a tensor elsewhere, as a GPU does, must know of which elements a payload is. That is
 * the plan's affair and the same on all ranks, so it can be said before there is a work.
 *
 *   parts 0 .. n-1, each with its segments' payloads       float32
 *   | 0 1 2 .. | 0 1 2 .. | (own) | 0 1 2 .. |             | own part |      RC_DIRECT
 *
 *   one part of each rank
 *   | 0 1 2 .. | 0 1 2 .. |                                                  RC_ONE_SHOT
 *
 * Contributions to other ranks' parts lie there encoded; that to this rank's own is added as it is,
 * so it lies behind them as float32. When the work is over each payload is that of the result, the
 * own part's too. Among two ranks each adds for itself, and who packs elsewhere can do that there
 * as well: when the work is over both contributions lie there as they came. Whether the sum has
 * something that is not finite the core finds out all the same (quantised_poisoned): then all of
 * the result is NaN.
 *
 * Without error feedback: residuals are in host memory, and so is what is encoded with them.
 */
#ifndef RINGCOMM_ENCODED_H
#define RINGCOMM_ENCODED_H

#include "work.h"

/* 1 if such a call can be given what is encoded already: all but what rc_check looks at. */
int encoded_suits(const rc_call *call, const work_env *env);
void encoded_layout(rc_layout *out, const work_env *env, const rc_call *call);

#endif

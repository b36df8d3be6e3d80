/* encoded.h - the layout (rc_layout) of all-reduces whose source and result are encoded already.
 *
 * A GPU that packs a tensor must know which elements a payload holds. The plan decides that, the
 * same on all ranks, so it is known before there is a work.
 *
 *   parts 0 .. n-1, each with its segments' payloads       float32
 *   | 0 1 2 .. | 0 1 2 .. | (own) | 0 1 2 .. |             | own part |      RC_DIRECT
 *
 *   one part of each rank
 *   | 0 1 2 .. | 0 1 2 .. |                                                  RC_ONE_SHOT
 *
 * Contributions to other ranks' parts are encoded; the one to this rank's own part is added as it
 * is, so it lies behind them as float32. When the work is over each payload is that of the result,
 * the own part's too. Among two ranks each adds for itself, on the GPU where that packs: when the
 * work is over both contributions lie there as they came. The core still finds out whether the sum
 * has a value that is not finite (quantised_poisoned): then all of the result is NaN.
 *
 * There is no error feedback here: residuals are in host memory, where tensors with feedback are
 * encoded.
 */
#ifndef RINGCOMM_ENCODED_H
#define RINGCOMM_ENCODED_H

#include "work.h"

/* Returns 1 if source and result of such a call can be encoded; rc_check looks at the rest. */
int encoded_suits(const rc_call *call, const work_env *env);
void encoded_layout(rc_layout *out, const work_env *env, const rc_call *call);

#endif

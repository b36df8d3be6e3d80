/* packed.h - calls whose rank encodes what it gives, and decodes what it gets, by itself. */
#ifndef RINGCOMM_SIM_PACKED_H
#define RINGCOMM_SIM_PACKED_H

#include "../../csrc/include/ringcomm.h"

typedef struct packed packed;

/* Encodes the source of a call of f32, which becomes one of encoded data. */
packed *packed_make(rc_comm *comm, rc_call *call);
/* Decodes the result to where the call would have had it. */
void packed_take_result(packed *p, const rc_work *w);
void packed_free(packed *p);

#endif

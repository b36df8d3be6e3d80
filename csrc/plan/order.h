/* order.h - in which order a rank needs the values that it contributes to an all-reduce.
 *
 *   ring      the chunk that starts here, then those that come by: r, r-1, ...
 *   direct    the parts of the others, each rank beginning with another; its own part last
 *   one-shot  as they lie
 *   codecs that quantise: in rows, the same segments of all parts of the others first; the own part
 *             a row behind, for it is joined only when theirs have come
 *
 * So whoever brings values to a rank bit by bit (csrc/pipe) knows what to bring first. Pure: no
 * state, no OS, no allocation.
 */
#ifndef RINGCOMM_ORDER_H
#define RINGCOMM_ORDER_H

#include "plan.h"

/* Elements that lie one after the other. */
typedef struct order_stretch {
    uint64_t start, elems;
} order_stretch;

/* How far one is; zeros: at the beginning. */
typedef struct order_cursor {
    uint32_t parts;  /* behind it */
    uint64_t within; /* elements of the next one behind it; in rows, of each one of the others */
    uint64_t own;    /* in rows: of the own one */
} order_cursor;

/* Parts that the source is needed in, one after the other; 0: this plan has no such order. */
uint32_t order_parts(const plan *p);
/* Which part is needed after so many others. */
uint32_t order_part(const plan *p, uint32_t index);
/* The next elements, at most so many, that lie in one stretch; 0 at the end. */
int order_next(const plan *p, order_cursor *cursor, uint64_t most, order_stretch *next);
/* The same in rows of so many elements of each part, whole segments of it: the row's next stretch,
 * which is of one part; 0 at the end of a row. After the last one rows are empty. */
int order_next_of_row(const plan *p, order_cursor *cursor, uint64_t elems, order_stretch *next);

#endif

/* marks.h - which elements of a buffer of residuals may be other than zero.
 *
 * The marks are a range outside which all is zero (live), and a hole in it that is zero, too. Zeros
 * that are marked need be neither read nor written; unmarked elements may be zero all the same.
 * Pure.
 */
#ifndef RINGCOMM_MARKS_H
#define RINGCOMM_MARKS_H

#include <stdint.h>

/* Elements from start to before end; none if end <= start. */
typedef struct feedback_range {
    uint64_t start, end;
} feedback_range;

typedef struct feedback_marks {
    feedback_range live, hole;
} feedback_marks;

static inline int range_is_empty(feedback_range r)
{
    return r.end <= r.start;
}

static inline int range_covers(feedback_range outer, feedback_range inner)
{
    return outer.start <= inner.start && inner.end <= outer.end;
}

static inline int range_overlaps(feedback_range a, feedback_range b)
{
    return !range_is_empty(a) && !range_is_empty(b) && a.start < b.end && b.start < a.end;
}

static inline feedback_range range_hull(feedback_range a, feedback_range b)
{
    if (range_is_empty(a) || range_is_empty(b))
        return range_is_empty(a) ? b : a;
    return (feedback_range){a.start < b.start ? a.start : b.start, a.end > b.end ? a.end : b.end};
}

/* Returns 1 if the range is marked as zero. */
static inline int marks_zero(const feedback_marks *m, feedback_range range)
{
    return range_is_empty(range) || !range_overlaps(range, m->live) || range_covers(m->hole, range);
}

static inline void marks_note_written(feedback_marks *m, feedback_range range)
{
    if (range_is_empty(range))
        return;
    m->live = range_hull(m->live, range);
    if (range_overlaps(range, m->hole))
        m->hole = (feedback_range){0};
}

static inline void marks_note_zero(feedback_marks *m, feedback_range range)
{
    if (!range_overlaps(range, m->live))
        return;
    if (range_covers(range, m->live))
        m->live = m->hole = (feedback_range){0};
    else if (range.start <= m->live.start)
        m->live.start = range.end;
    else if (range.end >= m->live.end)
        m->live.end = range.start;
    else
        m->hole = range;
}

#endif

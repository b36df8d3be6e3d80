/* segments.h - where a segment lies in the caller's memory; for the machines of a work. Pure. */
#ifndef RINGCOMM_SEGMENTS_H
#define RINGCOMM_SEGMENTS_H

#include "work.h"

/* Return a segment's place in src, and in dst. */
static inline const uint8_t *work_src(const rc_work *w, uint32_t chunk, uint32_t segment)
{
    uint64_t elems = plan_src_offset(&w->plan, chunk) + plan_segment_offset(&w->plan, segment);
    return (const uint8_t *)w->call.src + elems * w->codec.elem_bytes;
}

static inline uint8_t *work_dst(const rc_work *w, uint32_t chunk, uint32_t segment)
{
    uint64_t elems = plan_dst_offset(&w->plan, chunk) + plan_segment_offset(&w->plan, segment);
    return (uint8_t *)w->call.dst + elems * w->codec.elem_bytes;
}

#endif

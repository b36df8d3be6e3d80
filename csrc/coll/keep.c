/* keep.c - see keep.h. */
#include "keep.h"

#include <string.h>

#include "../base/copy.h"
#include "segments.h"

static int encodes(const rc_work *w)
{
    return w->plan.world_size > 1 && !codec_stores_plain(&w->codec);
}

/* dst = D(E(src)) */
static void keep_encoded(const rc_work *w, uint8_t *dst, const uint8_t *src, uint64_t elems)
{
    enum { PART = 1024 };
    uint16_t wire[PART];
    for (uint64_t start = 0; start < elems; start += PART) {
        size_t n = (size_t)(elems - start < PART ? elems - start : PART);
        size_t offset = start * w->codec.elem_bytes;
        codec_encode(&w->codec, wire, src + offset, n);
        codec_store(&w->codec, dst + offset, wire, n);
    }
}

/* Copies a piece as one copy of all bytes would be made. In a world of one src and dst may overlap.
 */
static void keep_plain(uint8_t *dst, const uint8_t *src, size_t bytes, uint64_t all_bytes)
{
    size_t apart = dst > src ? (size_t)(dst - src) : (size_t)(src - dst);
    if (apart < bytes)
        memmove(dst, src, bytes);
    else if (all_bytes >= COPY_PAST_CACHE_BYTES)
        copy_past_cache(dst, src, bytes);
    else
        copy_bytes(dst, src, bytes);
}

void keep_begin(rc_work *w)
{
    uint32_t chunk = plan_local_copy_chunk(&w->plan);
    if (chunk == PLAN_NO_CHUNK)
        return;
    if (encodes(w) || work_dst(w, chunk, 0) != work_src(w, chunk, 0))
        w->keeps_left = plan_chunk_elems(&w->plan, chunk);
    keep_some(w);
}

int keep_is_left(const rc_work *w)
{
    return w->keeps_left > 0 && w->env != NULL;
}

void keep_some(rc_work *w)
{
    if (!keep_is_left(w))
        return;
    uint32_t chunk = plan_local_copy_chunk(&w->plan);
    const uint8_t *src = work_src(w, chunk, 0);
    uint8_t *dst = work_dst(w, chunk, 0);
    uint64_t most = KEEP_PIECE_BYTES / w->codec.elem_bytes, all = plan_chunk_elems(&w->plan, chunk);
    uint64_t n = w->keeps_left < most ? w->keeps_left : most, start = all - w->keeps_left;
    w->keeps_left -= n;
    if (dst > src) /* in a world of one they may overlap: from the end */
        start = w->keeps_left;
    src += start * w->codec.elem_bytes;
    dst += start * w->codec.elem_bytes;
    if (encodes(w))
        keep_encoded(w, dst, src, n);
    else
        keep_plain(dst, src, n * w->codec.elem_bytes, all * w->codec.elem_bytes);
}

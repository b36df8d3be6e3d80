/* copy.h - copies of what may be large, faster than memcpy where that is slow.
 *
 * Pure: no state, no OS. n may be 0; dst and src do not overlap.
 */
#ifndef RINGCOMM_COPY_H
#define RINGCOMM_COPY_H

#include <stddef.h>

/* memcpy, but where dst lies a little above src within a page. Loads there look to the CPU as if
 * they wanted what was just stored, and a C library that copies by string instructions is 15 times
 * slower (Zen 3: 3 instead of 45 GB/s; large numpy arrays begin 16 bytes into a page). There it
 * copies from the end on, where nothing that is loaded looks like anything stored. */
void copy_bytes(void *dst, const void *src, size_t n);

/* What belongs to a tensor of so much would not stay in the caches. */
enum { COPY_PAST_CACHE_BYTES = 8 << 20 };

/* The same past the caches, for what is part of so much that it would not stay there: a line that
 * is written whole need not be read first (Zen 3, out of a cache: 16 GB/s, memcpy 10). */
void copy_past_cache(void *dst, const void *src, size_t n);

#endif

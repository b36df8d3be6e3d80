/* copy.h - copies of large memory, faster than memcpy where memcpy is slow.
 *
 * Pure: no state, no OS. n may be 0; dst and src do not overlap.
 */
#ifndef RINGCOMM_COPY_H
#define RINGCOMM_COPY_H

#include <stddef.h>

/* Copies as memcpy does, except where dst lies a little above src within a page. There the CPU
 * takes loads for loads of what was just stored, and a C library that copies by string instructions
 * is 15 times slower (Zen 3: 3 instead of 45 GB/s; large numpy arrays begin 16 bytes into a page).
 * Such a copy runs from the end, where no load looks like one of a recent store. */
void copy_bytes(void *dst, const void *src, size_t n);

/* Bytes of a tensor from which on it would not stay in the caches. */
enum { COPY_PAST_CACHE_BYTES = 8 << 20 };

/* Copies past the caches, for part of a tensor of at least COPY_PAST_CACHE_BYTES: a line that is
 * written whole need not be read first (Zen 3, out of a cache: 16 GB/s, memcpy 10). */
void copy_past_cache(void *dst, const void *src, size_t n);

#endif

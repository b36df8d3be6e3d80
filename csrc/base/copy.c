/* copy.c - see copy.h. */
#include "copy.h"

#include <stdint.h>
#include <string.h>

#ifdef __x86_64__
#include <emmintrin.h>
#endif

/* Copies blocks of several vectors, the last block first. */
static void copy_backwards(uint8_t *dst, const uint8_t *src, size_t n)
{
    typedef struct block {
        uint64_t word[16];
    } block;
    while (n >= sizeof(block)) {
        block now;
        n -= sizeof now;
        memcpy(&now, src + n, sizeof now);
        memcpy(dst + n, &now, sizeof now);
    }
    memcpy(dst, src, n);
}

void copy_bytes(void *dst, const void *src, size_t n)
{
    enum { PAGE = 4096, NEAR = 64 };
    size_t above = (size_t)((uintptr_t)dst - (uintptr_t)src) % PAGE;
    if (above > 0 && above < NEAR && n >= PAGE)
        copy_backwards(dst, src, n);
    else
        memcpy(dst, src, n);
}

#ifdef __x86_64__

void copy_past_cache(void *dst, const void *src, size_t n)
{
    enum { LINE = 64, VECTOR = sizeof(__m128i), VECTORS = LINE / VECTOR };
    uint8_t *to = dst;
    const uint8_t *from = src;
    size_t head = (size_t)(-(uintptr_t)to % LINE);
    if (n < head + LINE) {
        memcpy(to, from, n);
        return;
    }
    memcpy(to, from, head);
    size_t at = head;
    for (; at + LINE <= n; at += LINE) {
        __m128i line[VECTORS];
        for (int i = 0; i < VECTORS; i++)
            line[i] = _mm_loadu_si128((const __m128i *)(from + at) + i);
        for (int i = 0; i < VECTORS; i++)
            _mm_stream_si128((__m128i *)(to + at) + i, line[i]);
    }
    _mm_sfence(); /* nothing else orders streaming stores */
    memcpy(to + at, from + at, n - at);
}

#else

void copy_past_cache(void *dst, const void *src, size_t n)
{
    copy_bytes(dst, src, n);
}

#endif

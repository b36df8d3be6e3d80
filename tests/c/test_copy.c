/* test_copy.c - copies at every offset, whole and with nothing written beside them. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/base/copy.h"
#include "check.h"

enum { PAGE = 4096, MARGIN = 256, MOST = 3 * PAGE };

typedef void copy_fn(void *dst, const void *src, size_t n);

static uint8_t from[MOST + 2 * MARGIN], to[MOST + 2 * MARGIN], wanted[MOST + 2 * MARGIN];

static void copies(copy_fn *copy, size_t dst_offset, size_t src_offset, size_t n)
{
    memset(to, 0xee, sizeof to);
    memset(wanted, 0xee, sizeof wanted);
    memcpy(wanted + dst_offset, from + src_offset, n);
    copy(to + dst_offset, from + src_offset, n);
    CHECK(memcmp(to, wanted, sizeof to) == 0);
}

static void every_offset(copy_fn *copy)
{
    static const size_t sizes[] = {0,   1,    63,   64,       65,        127, 128,
                                   200, 4095, 4096, PAGE + 1, MOST - 63, MOST};
    for (size_t i = 0; i < sizeof from; i++)
        from[i] = (uint8_t)(i * 131 + i / 251);
    for (size_t size = 0; size < CHECK_COUNT(sizes); size++)
        for (size_t dst = 0; dst <= 130; dst += 1 + dst / 20)
            for (size_t src = 0; src <= 66; src += 11)
                copies(copy, dst, src, sizes[size]);
}

static void bytes(void)
{
    every_offset(copy_bytes);
}

static void past_cache(void)
{
    every_offset(copy_past_cache);
}

int main(void)
{
    static const check_test tests[] = {{"bytes", bytes}, {"past_cache", past_cache}};
    return check_run(tests, CHECK_COUNT(tests));
}

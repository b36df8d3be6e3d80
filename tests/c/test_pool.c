/* test_pool.c - buffers: aligned, whole, reused last in first out, kept up to a limit. The address
 * sanitizer's leak check is part of this test.
 */
#include <stdint.h>
#include <string.h>

#include "../../csrc/base/pool.h"
#include "check.h"

enum { TAKEN = 5 };

static void buffers_are_whole_and_aligned(void)
{
    static const size_t sizes[] = {1, 63, 64, 65, 4096, 4097};
    for (size_t s = 0; s < CHECK_COUNT(sizes); s++) {
        pool p;
        pool_buffer *taken[TAKEN];
        pool_init(&p, sizes[s], TAKEN);
        for (int i = 0; i < TAKEN; i++) {
            taken[i] = pool_take(&p);
            CHECK_EQ((uintptr_t)taken[i]->data % 64, 0);
            memset(taken[i]->data, i, sizes[s]);
        }
        CHECK_EQ(p.taken, TAKEN);
        for (int i = 0; i < TAKEN; i++) {
            CHECK_EQ(taken[i]->data[0], i);
            CHECK_EQ(taken[i]->data[sizes[s] - 1], i);
            pool_return(&p, taken[i]);
        }
        CHECK_EQ(p.taken, 0);
        CHECK_EQ(p.idle, TAKEN);
        pool_destroy(&p);
        CHECK_EQ(p.idle, 0);
    }
}

static void last_returned_is_taken_first(void)
{
    pool p;
    pool_init(&p, 100, 8);
    pool_buffer *a = pool_take(&p), *b = pool_take(&p);
    pool_return(&p, a);
    pool_return(&p, b);
    CHECK(pool_take(&p) == b);
    CHECK(pool_take(&p) == a);
    CHECK_EQ(p.taken, 2);
    CHECK_EQ(p.idle, 0);
    pool_return(&p, b);
    pool_return(&p, a);
    pool_destroy(&p);
}

static void keeps_no_more_than_told(void)
{
    pool p;
    pool_buffer *taken[TAKEN];
    pool_init(&p, 100, 2);
    for (int i = 0; i < TAKEN; i++)
        taken[i] = pool_take(&p);
    for (int i = 0; i < TAKEN; i++)
        pool_return(&p, taken[i]);
    CHECK_EQ(p.idle, 2);
    pool_return(&p, NULL);
    CHECK_EQ(p.idle, 2);
    CHECK_EQ(p.taken, 0);
    pool_destroy(&p);
}

int main(void)
{
    static const check_test tests[] = {
        {"buffers_are_whole_and_aligned", buffers_are_whole_and_aligned},
        {"last_returned_is_taken_first", last_returned_is_taken_first},
        {"keeps_no_more_than_told", keeps_no_more_than_told},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

/* test_pool.c - buffers: aligned, whole, reused last in first out, kept up to a limit and for
 * as long as they are in use. The address
 * sanitizer's leak check is part of this test.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

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

static void take_and_return(pool *p, int count)
{
    pool_buffer *taken[TAKEN];
    for (int i = 0; i < count; i++)
        taken[i] = pool_take(p);
    for (int i = 0; i < count; i++)
        pool_return(p, taken[i]);
}

/* A loop that takes as many between any two marks never allocates. */
static void what_is_used_stays(void)
{
    pool p;
    pool_init(&p, 100, TAKEN);
    take_and_return(&p, TAKEN);
    CHECK_EQ(pool_trim(&p, TAKEN), 0);
    for (int round = 0; round < 10; round++) {
        take_and_return(&p, TAKEN);
        CHECK_EQ(pool_trim(&p, TAKEN), 0);
        CHECK_EQ(p.idle, TAKEN);
    }
    pool_destroy(&p);
}

static void what_is_not_used_goes(void)
{
    pool p;
    pool_init(&p, 100, TAKEN);
    take_and_return(&p, TAKEN);
    CHECK_EQ(pool_trim(&p, TAKEN), 0); /* they were used before the first mark */
    CHECK_EQ(p.idle, TAKEN);
    pool_buffer *last = p.free;
    take_and_return(&p, 2);
    CHECK_EQ(pool_trim(&p, TAKEN), 0);
    CHECK_EQ(p.idle, 2);
    pool_buffer *out = pool_take(&p);
    CHECK(out == last || p.free == last); /* the others went */
    CHECK_EQ(pool_trim(&p, TAKEN), 0);
    CHECK_EQ(p.idle, 0);
    pool_return(&p, out);
    CHECK_EQ(p.idle, 1);
    CHECK_EQ(pool_trim(&p, TAKEN), 0); /* not idle at the mark */
    CHECK_EQ(p.idle, 1);
    CHECK_EQ(pool_trim(&p, TAKEN), 0);
    CHECK_EQ(p.idle, 0);
    CHECK(p.free == NULL);
    pool_destroy(&p);
}

static void a_few_go_at_a_time(void)
{
    pool p;
    pool_init(&p, 100, TAKEN);
    take_and_return(&p, TAKEN);
    CHECK_EQ(pool_trim(&p, 2), 0);
    CHECK_EQ(pool_trim(&p, 2), 1);
    CHECK_EQ(p.idle, TAKEN - 2);
    take_and_return(&p, TAKEN - 3); /* of three, one is still spare */
    CHECK_EQ(pool_trim(&p, 2), 0);
    CHECK_EQ(p.idle, TAKEN - 3);
    pool_destroy(&p);
}

static long resident_bytes(void)
{
    long size = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%ld %ld", &size, &resident) == 2);
    fclose(file);
    return resident * sysconf(_SC_PAGESIZE);
}

/* To the system, not just to the allocator: here what is freed lies before what is not. */
static void the_system_gets_it(void)
{
    enum { BYTES = 100000, COUNT = 400, MANY = BYTES * COUNT };
    pool p;
    static pool_buffer *taken[COUNT];
    pool_init(&p, BYTES, COUNT);
    for (int i = 0; i < COUNT; i++) {
        taken[i] = pool_take(&p);
        memset(taken[i]->data, 1, BYTES);
    }
    for (int i = 0; i < COUNT; i++)
        pool_return(&p, taken[i]);
    taken[0] = pool_take(&p); /* the last of them */
    long before = resident_bytes();
    CHECK_EQ(pool_trim(&p, COUNT), 0);
    CHECK_EQ(pool_trim(&p, COUNT), 0);
    CHECK(resident_bytes() < before - MANY / 10 * 8);
    CHECK_EQ(taken[0]->data[0] + taken[0]->data[BYTES - 1], 2);
    pool_return(&p, taken[0]);
    pool_destroy(&p);
}

/* Against a list of what is free, whatever is done. */
static void counts_stay_right(void)
{
    enum { STEPS = 20000, KEEP = 7, MOST = 12 };
    pool p;
    pool_buffer *taken[MOST];
    int out = 0;
    uint32_t seed = 12345;
    pool_init(&p, 100, KEEP);
    for (int step = 0; step < STEPS; step++) {
        seed = seed * 1664525u + 1013904223u;
        uint32_t drawn = seed >> 16;
        if (drawn % 16 == 0)
            pool_trim(&p, (int)(drawn / 16 % 4));
        else if (drawn % 2 && out < MOST)
            taken[out++] = pool_take(&p);
        else if (out > 0)
            pool_return(&p, taken[--out]);
        int idle = 0;
        for (const pool_buffer *buffer = p.free; buffer != NULL; buffer = buffer->next)
            idle++;
        CHECK_EQ(p.idle, idle);
        CHECK_EQ(p.taken, out);
        CHECK(p.spare >= 0 && p.spare <= idle && idle <= KEEP);
    }
    while (out > 0)
        pool_return(&p, taken[--out]);
    pool_destroy(&p);
}

int main(void)
{
    static const check_test tests[] = {
        {"buffers_are_whole_and_aligned", buffers_are_whole_and_aligned},
        {"last_returned_is_taken_first", last_returned_is_taken_first},
        {"keeps_no_more_than_told", keeps_no_more_than_told},
        {"what_is_used_stays", what_is_used_stays},
        {"what_is_not_used_goes", what_is_not_used_goes},
        {"a_few_go_at_a_time", a_few_go_at_a_time},
        {"the_system_gets_it", the_system_gets_it},
        {"counts_stay_right", counts_stay_right},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

/* test_keyed.c - queues found by a key: each keeps its order, none sees another's entries, and what
 * is looked at does not grow with what is there. */
#include "../../csrc/base/keyed.h"

#include <stdlib.h>

#include "check.h"

enum { MANY = 20000, KEYS = 500 };

typedef struct item {
    keyed_entry entry; /* first */
    int number;
} item;

static item items[MANY];

static uint64_t key_of(int i)
{
    return (uint64_t)(i % KEYS) << 32 | (uint32_t)(i % 7);
}

static void each_key_keeps_its_order(void)
{
    keyed_queues t = {0};
    for (int i = 0; i < MANY; i++) {
        items[i].number = i;
        keyed_push(&t, &items[i].entry, key_of(i));
    }
    CHECK_EQ(t.queues, KEYS * 7);
    for (int first = 0; first < KEYS * 7; first++)
        for (int i = first; i < MANY; i += KEYS * 7) {
            const item *next = (item *)keyed_first(&t, key_of(first));
            if (!CHECK(next != NULL) || !CHECK_EQ(next->number, i))
                return;
            CHECK(keyed_pop(&t, key_of(first)) == &items[i].entry);
        }
    CHECK_EQ(t.queues, 0);
    CHECK(keyed_pop(&t, 0) == NULL);
    CHECK(keyed_first(&t, 0) == NULL);
    keyed_destroy(&t);
}

static void entries_follow_each_other(void)
{
    keyed_queues t = {0};
    for (int i = 0; i < 10; i++)
        keyed_push(&t, &items[i].entry, (uint64_t)i % 2);
    int count = 0;
    for (const keyed_entry *e = keyed_first(&t, 1); e != NULL; e = e->next)
        CHECK(e == &items[2 * count++ + 1].entry);
    CHECK_EQ(count, 5);
    while (keyed_pop_any(&t) != NULL)
        count++;
    CHECK_EQ(count, 15);
    keyed_destroy(&t);
}

/* The first, one between, the last, the only one; and pushes afterwards. */
static void any_entry_can_be_taken_out(void)
{
    for (int gone = 0; gone < 4; gone++)
        for (int length = gone + 1; length <= 4; length++) {
            keyed_queues t = {0};
            for (int i = 0; i < length; i++)
                keyed_push(&t, &items[i].entry, 5);
            keyed_push(&t, &items[8].entry, 6);
            keyed_remove(&t, &items[gone].entry);
            keyed_push(&t, &items[9].entry, 5);
            for (int i = 0; i < length; i++)
                if (i != gone)
                    CHECK(keyed_pop(&t, 5) == &items[i].entry);
            CHECK(keyed_pop(&t, 5) == &items[9].entry);
            CHECK(keyed_pop(&t, 5) == NULL);
            CHECK(keyed_pop(&t, 6) == &items[8].entry);
            CHECK_EQ(t.queues, 0);
            keyed_destroy(&t);
        }
}

static void everything_can_be_emptied(void)
{
    keyed_queues t = {0};
    for (int i = 0; i < MANY; i++)
        keyed_push(&t, &items[i].entry, (uint64_t)i * 3);
    int count = 0;
    while (keyed_pop_any(&t) != NULL)
        count++;
    CHECK_EQ(count, MANY);
    keyed_push(&t, &items[0].entry, 1); /* usable afterwards */
    CHECK(keyed_pop_any(&t) == &items[0].entry);
    keyed_destroy(&t);
}

/* Names of sends: tags in steps, each with its first numbers. */
static double visits_each(int count, uint64_t step)
{
    keyed_queues t = {0};
    for (int i = 0; i < count; i++)
        keyed_push(&t, &items[i].entry, (uint64_t)i * step);
    for (int i = count - 1; i >= 0; i--)
        CHECK(keyed_pop(&t, (uint64_t)i * step) == &items[i].entry);
    double each = (double)t.visited / (2.0 * count);
    keyed_destroy(&t);
    return each;
}

static void cost_does_not_grow(void)
{
    static const uint64_t steps[] = {1,
                                     2,
                                     1000,
                                     UINT64_C(1) << 32,
                                     UINT64_C(1000) << 32,
                                     (UINT64_C(1) << 32) + 1,
                                     UINT64_C(1) << 48};
    for (size_t i = 0; i < CHECK_COUNT(steps); i++) {
        CHECK(visits_each(100, steps[i]) < 4.0);
        CHECK(visits_each(MANY, steps[i]) < 4.0);
    }
}

int main(void)
{
    static const check_test tests[] = {
        {"each_key_keeps_its_order", each_key_keeps_its_order},
        {"entries_follow_each_other", entries_follow_each_other},
        {"any_entry_can_be_taken_out", any_entry_can_be_taken_out},
        {"everything_can_be_emptied", everything_can_be_emptied},
        {"cost_does_not_grow", cost_does_not_grow},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

/* test_turns.c - contributions in any order are handed out in theirs, and none is lost. */
#include "../../csrc/coll/turns.h"
#include "check.h"
#include "reference.h"

enum { UNITS = 3, TURNS = 4, BYTES = 64 };

static pool buffers;

static pool_buffer *contribution(uint32_t unit, uint32_t turn)
{
    pool_buffer *buffer = pool_take(&buffers);
    buffer->data[0] = (uint8_t)(16 * unit + turn);
    return buffer;
}

/* Takes what is next, as merge.c does. */
static void take_all(turns *t, uint32_t unit)
{
    pool_buffer *buffer;
    while ((buffer = turns_next(t, unit)) != NULL) {
        CHECK_EQ(buffer->data[0], 16 * unit + t->of[unit].over);
        pool_return(&buffers, t->of[unit].value);
        t->of[unit].value = buffer;
        t->of[unit].over++;
    }
}

static void each_in_its_turn(void)
{
    uint64_t seed = 4711;
    for (int round = 0; round < 200; round++) {
        turns t;
        int left = UNITS * TURNS, here[UNITS][TURNS] = {{0}};
        pool_init(&buffers, BYTES, 4);
        CHECK_EQ(turns_init(&t, UNITS, TURNS), RC_OK);
        for (; left > 0; left--) {
            uint32_t unit, turn;
            do {
                unit = (uint32_t)draw_below(&seed, UNITS);
                turn = (uint32_t)draw_below(&seed, TURNS);
            } while (here[unit][turn]);
            here[unit][turn] = 1;
            turns_keep(&t, unit, turn, contribution(unit, turn));
            take_all(&t, unit);
            uint32_t ready = 0;
            while (ready < TURNS && here[unit][ready])
                ready++;
            CHECK_EQ(t.of[unit].over, ready);
        }
        CHECK_EQ(buffers.taken, UNITS);
        turns_destroy(&t, &buffers);
        CHECK_EQ(buffers.taken, 0);
        pool_destroy(&buffers);
    }
}

static void what_waits_is_given_back(void)
{
    turns t;
    pool_init(&buffers, BYTES, 4);
    CHECK_EQ(turns_init(&t, UNITS, TURNS), RC_OK);
    turns_keep(&t, 1, 2, contribution(1, 2));
    CHECK(turns_next(&t, 1) == NULL);
    turns_destroy(&t, &buffers);
    CHECK_EQ(buffers.taken, 0);
    turns_destroy(&t, &buffers); /* twice is once */
    pool_destroy(&buffers);
}

static void nothing_to_merge(void)
{
    turns t;
    CHECK_EQ(turns_init(&t, 0, TURNS), RC_OK);
    turns_destroy(&t, NULL);
    CHECK_EQ(turns_init(&t, UNITS, 0), RC_OK); /* one that only waits for the result */
    CHECK(turns_next(&t, 0) == NULL);
    turns_destroy(&t, NULL);
}

int main(void)
{
    static const check_test tests[] = {
        {"each_in_its_turn", each_in_its_turn},
        {"what_waits_is_given_back", what_waits_is_given_back},
        {"nothing_to_merge", nothing_to_merge},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

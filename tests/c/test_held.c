/* test_held.c - frames that may not leave yet: collectives leave in order of seq, sends in the
 * order in which they were held, and a tag's at once when its receives are called. */
#include "../../csrc/net/held.h"

#include <stdlib.h>

#include "../../csrc/net/tags.h"
#include "check.h"

enum { MANY = 3000 };

static out_frame frames[MANY];

static out_frame *make(int i, uint64_t seq, int is_send)
{
    frames[i] =
        (out_frame){.header = {.type = FRAME_DATA, .seq = seq, .flags = is_send ? FRAME_P2P : 0}};
    frames[i].header.segment = (uint32_t)i;
    return &frames[i];
}

static uint64_t next_random(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + 1442695040888963407;
    return *state >> 33;
}

/* Pushed and popped by turns: what comes out is always the lowest, of equal ones the oldest. */
static void collectives_leave_in_order(void)
{
    held_frames held = {0};
    uint64_t state = 1;
    int pushed = 0, popped = 0;
    while (popped < MANY) {
        int pushes = (int)(next_random(&state) % 40);
        for (int i = 0; i < pushes && pushed < MANY; i++, pushed++)
            held_push(&held, make(pushed, next_random(&state) % 50, 0));
        const out_frame *before = NULL;
        int pops = (int)(next_random(&state) % 40);
        for (int i = 0; i < pops && held.count > 0; i++, popped++) {
            const out_frame *first = held_first(&held, 0), *frame = held_pop(&held, 0);
            if (!CHECK(first == frame))
                return;
            if (before != NULL)
                CHECK(before->header.seq < frame->header.seq ||
                      (before->header.seq == frame->header.seq &&
                       before->header.segment < frame->header.segment));
            before = frame;
        }
    }
    CHECK_EQ(held.count, 0);
    CHECK(held_first(&held, 0) == NULL);
    CHECK(held_pop(&held, 0) == NULL);
    held_destroy(&held);
}

static void sends_leave_as_they_were_held(void)
{
    held_frames held = {0};
    for (int i = 0; i < MANY; i++)
        held_push(&held, make(i, tags_name((uint32_t)(MANY - i) % 100, (uint32_t)i / 100), 1));
    CHECK(held_first(&held, 0) == NULL);
    CHECK(held_pop(&held, 0) == NULL);
    for (int i = 0; i < MANY; i++)
        if (!CHECK(held_pop(&held, 1) == &frames[i]))
            return;
    CHECK_EQ(held.count, 0);
    CHECK(held_pop(&held, 1) == NULL);
    held_destroy(&held);
}

/* From the front, the middle and the end of the list of all. */
static void a_tag_leaves_by_itself(void)
{
    for (uint32_t tag = 0; tag < 3; tag++) {
        held_frames held = {0};
        for (int i = 0; i < 9; i++)
            held_push(&held, make(i, tags_name((uint32_t)i % 3, (uint32_t)i / 3), 1));
        for (int i = (int)tag; i < 9; i += 3) {
            CHECK(held_first_of_tag(&held, tag) == &frames[i]);
            CHECK(held_pop_of_tag(&held, tag) == &frames[i]);
        }
        CHECK(held_pop_of_tag(&held, tag) == NULL);
        for (int i = 0; i < 9; i++)
            if (i % 3 != (int)tag)
                CHECK(held_pop(&held, 1) == &frames[i]);
        CHECK(held_first(&held, 1) == NULL);
        CHECK_EQ(held.count, 0);
        held_destroy(&held);
    }
}

static void what_waits_behind_what(void)
{
    held_frames held = {0};
    frame_header collective = {.seq = 7}, send = {.seq = tags_name(4, 9), .flags = FRAME_P2P};
    CHECK(!held_before(&held, &collective));
    CHECK(!held_before(&held, &send));
    held_push(&held, make(0, 8, 0));
    held_push(&held, make(1, tags_name(5, 0), 1));
    CHECK(!held_before(&held, &collective)); /* a later one is held */
    CHECK(!held_before(&held, &send));       /* another tag is */
    held_push(&held, make(2, 7, 0));
    held_push(&held, make(3, tags_name(4, 8), 1));
    CHECK(held_before(&held, &collective));
    CHECK(held_before(&held, &send));
    for (int is_send = 0; is_send < 2; is_send++)
        while (held_pop(&held, is_send) != NULL)
            continue;
    held_destroy(&held);
}

int main(void)
{
    static const check_test tests[] = {
        {"collectives_leave_in_order", collectives_leave_in_order},
        {"sends_leave_as_they_were_held", sends_leave_as_they_were_held},
        {"a_tag_leaves_by_itself", a_tag_leaves_by_itself},
        {"what_waits_behind_what", what_waits_behind_what},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

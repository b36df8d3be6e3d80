/* test_gate.c - which units are open and final, whatever the stretches in which that is told. */
#include "../../csrc/coll/gate.h"

#include <string.h>

#include "check.h"
#include "reference.h"

enum { WORLD = 3, COUNT = 7000, SEGMENT = 512, LEAST = 600, MOST = 2000, SHOWN = 256 };

static plan plan_of(uint64_t count)
{
    plan p;
    rc_call call = {.collective = RC_ALLREDUCE, .dtype = RC_F32, .count = count};
    plan_init(&p, &call, RC_RING, 1, WORLD, SEGMENT);
    return p;
}

static gate *open_gate(const plan *p)
{
    gate *g = gate_create(SHOWN, LEAST, MOST);
    CHECK_EQ(gate_lay_out(g, p), RC_OK);
    return g;
}

/* ---- the source ---- */

static int is_there(const uint8_t *there, const plan *p, uint32_t part, uint32_t segment)
{
    uint64_t start = plan_src_offset(p, part) + plan_segment_offset(p, segment);
    for (uint64_t i = 0; i < plan_segment_elems(p, part, segment); i++)
        if (!there[start + i])
            return 0;
    return 1;
}

static void check_open(const gate *g, const plan *p, const uint8_t *there)
{
    for (uint32_t part = 0; part < WORLD; part++)
        for (uint32_t segment = 0; segment < plan_segments(p, part); segment++)
            CHECK_EQ(gate_is_open(g, part, segment), is_there(there, p, part, segment));
}

/* In random stretches, in random order; some of them before there is a plan. */
static void units_open_with_their_last_value(void)
{
    uint64_t seed = 99;
    for (int round = 0; round < 50; round++) {
        uint8_t there[COUNT] = {0};
        order_stretch parts[SHOWN];
        plan p = plan_of(COUNT);
        gate *g = gate_create(SHOWN, LEAST, MOST);
        int count = 0, laid_out = 0, opened = 0;
        for (uint64_t at = 0; at < COUNT; at += parts[count++].elems) {
            uint64_t elems = 1 + draw_below(&seed, count < 200 ? 400 : 4000);
            parts[count] = (order_stretch){at, elems < COUNT - at ? elems : COUNT - at};
        }
        for (int i = 0; i < count; i++) {
            int other = i + (int)draw_below(&seed, (uint64_t)(count - i));
            order_stretch one = parts[other];
            parts[other] = parts[i];
            memset(there + one.start, 1, one.elems);
            gate_show(g, one);
            if (!laid_out && i < count / 4)
                continue;
            if (!laid_out)
                CHECK_EQ(gate_lay_out(g, &p), RC_OK);
            laid_out = 1;
            uint32_t part, segment;
            CHECK(gate_may_open(g));
            for (; gate_next(g, &part, &segment); opened++)
                CHECK(is_there(there, &p, part, segment));
            CHECK(!gate_may_open(g));
            check_open(g, &p, there);
        }
        int units = 0;
        for (uint32_t part = 0; part < WORLD; part++)
            units += (int)plan_segments(&p, part);
        CHECK_EQ(opened, units);
        gate_end(g, NULL, 0);
        gate_free(g);
    }
}

static void what_is_held_is_given_back(void)
{
    pool buffers;
    plan p = plan_of(COUNT);
    gate *g = open_gate(&p);
    pool_init(&buffers, 64, 4);
    pool_buffer *first = pool_take(&buffers), *second = pool_take(&buffers);
    CHECK(gate_held(g, 1, 2) == NULL);
    gate_hold(g, 1, 2, first);
    gate_hold(g, 2, 0, second);
    CHECK(gate_held(g, 1, 2) == first);
    CHECK(gate_held(g, 1, 2) == NULL);
    pool_return(&buffers, first);
    CHECK_EQ(buffers.taken, 1);
    gate_end(g, &buffers, 0);
    CHECK_EQ(buffers.taken, 0);
    gate_free(g);
    pool_destroy(&buffers);
}

/* ---- the result ---- */

static void neighbours_are_taken_as_one(void)
{
    order_stretch next;
    plan p = plan_of(COUNT); /* parts of 2560 in 5 segments, the last of 1880 */
    gate *g = open_gate(&p);
    CHECK(!gate_take(g, &next));
    gate_final(g, 0, 3);
    gate_final(g, 1, 0);
    gate_final(g, 0, 4);
    gate_final(g, 2, 3);
    CHECK(gate_take(g, &next));
    CHECK_EQ(next.start, 3 * SEGMENT);
    CHECK_EQ(next.elems, 3 * SEGMENT);
    CHECK(gate_take(g, &next));
    CHECK_EQ(next.start, 2 * 2560 + 3 * SEGMENT);
    CHECK_EQ(next.elems, COUNT - next.start);
    CHECK(!gate_take(g, &next));
    gate_end(g, NULL, 1); /* the rest is final by that */
    CHECK(gate_take(g, &next));
    CHECK_EQ(next.start, 0);
    CHECK_EQ(next.elems, 3 * SEGMENT);
    CHECK(gate_take(g, &next));
    CHECK_EQ(next.start, 2560 + SEGMENT);
    CHECK_EQ(next.elems, 2560 - SEGMENT + 3 * SEGMENT);
    CHECK(!gate_take(g, &next));
    gate_free(g);
}

static void nothing_is_final_after_a_failure(void)
{
    order_stretch next;
    plan p = plan_of(COUNT);
    gate *g = open_gate(&p);
    gate_end(g, NULL, 0);
    CHECK(!gate_take(g, &next));
    gate_free(g);
}

/* Takes as soon as it is told to: how much, each time. */
static int take_ripe(gate *g, const plan *p, uint64_t sizes[])
{
    order_stretch next;
    int count = 0;
    for (uint32_t part = 0; part < WORLD; part++)
        for (uint32_t segment = 0; segment < plan_segments(p, part); segment++) {
            int became = gate_final(g, part, segment);
            CHECK_EQ(became, atomic_load(&g->ripe));
            if (!became)
                continue;
            for (sizes[count] = 0; gate_take(g, &next);)
                sizes[count] += next.elems;
            count++;
            CHECK_EQ(atomic_load(&g->ripe), 0);
        }
    return count;
}

/* Once a lot, then about half of what is left, then the least. */
static void it_is_ripe_with_less_and_less(void)
{
    uint64_t sizes[64] = {0}, all = 0;
    plan p = plan_of(COUNT);
    gate *g = open_gate(&p);
    int count = take_ripe(g, &p, sizes);
    CHECK(count > 3);
    for (int i = 0; i < count; i++) {
        CHECK(i == 0 || sizes[i] <= sizes[i - 1]);
        all += sizes[i];
    }
    CHECK_EQ(all, COUNT);
    CHECK(sizes[0] >= MOST && sizes[0] < MOST + SEGMENT);
    CHECK(sizes[count - 1] < LEAST + SEGMENT);
    gate_free(g);
}

static void once_ripe_it_says_so_once(void)
{
    plan p = plan_of(COUNT);
    gate *g = open_gate(&p);
    int became = 0;
    for (uint32_t segment = 0; segment < 5; segment++)
        became += gate_final(g, 0, segment) + gate_final(g, 1, segment);
    CHECK_EQ(became, 1);
    gate_free(g);
}

/* Units are counted in the order of parts, which these have not. */
static void a_plan_without_an_order_is_refused(void)
{
    static const rc_algorithm none[] = {RC_DOUBLING, RC_HALVING};
    for (size_t i = 0; i < CHECK_COUNT(none); i++) {
        plan p;
        rc_call call = {.collective = RC_ALLREDUCE, .dtype = RC_F32, .count = COUNT};
        plan_init(&p, &call, none[i], 1, WORLD, SEGMENT);
        gate *g = gate_create(SHOWN, LEAST, MOST);
        CHECK_EQ(gate_lay_out(g, &p), RC_INTERNAL);
        gate_show(g, (order_stretch){0, COUNT});
        uint32_t part, segment;
        CHECK(!gate_may_open(g));
        CHECK(!gate_next(g, &part, &segment));
        gate_end(g, NULL, 1);
        gate_free(g);
    }
}

int main(void)
{
    static const check_test tests[] = {
        {"units_open_with_their_last_value", units_open_with_their_last_value},
        {"what_is_held_is_given_back", what_is_held_is_given_back},
        {"neighbours_are_taken_as_one", neighbours_are_taken_as_one},
        {"nothing_is_final_after_a_failure", nothing_is_final_after_a_failure},
        {"it_is_ripe_with_less_and_less", it_is_ripe_with_less_and_less},
        {"once_ripe_it_says_so_once", once_ripe_it_says_so_once},
        {"a_plan_without_an_order_is_refused", a_plan_without_an_order_is_refused},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

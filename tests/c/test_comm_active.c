/* test_comm_active.c - works in flight: frames find the one that they are for by its name, whatever
 * else is in flight, and none that is over. */
#include "peer.h"

enum { MANY = 300 };

static float data[4];

static rc_work *find(const stage *s, int from, uint16_t flags, uint64_t seq)
{
    frame_header h = {.type = FRAME_DATA, .flags = flags, .seq = seq};
    engine_lock(s->engine);
    rc_work *w = comm_active_find(s->comm, &h, from);
    engine_unlock(s->engine);
    return w;
}

static rc_work *receive(const stage *s, int from, uint32_t tag)
{
    rc_call call = small_call(RC_RECV, data, 1);
    call.root = from;
    call.tag = tag;
    return submit(s->comm, &call);
}

static void abandon(stage *s, rc_work **works, int count)
{
    rc_comm_abort(s->comm, "the test is over");
    for (int i = 0; i < count; i++)
        rc_work_free(works[i]);
    stage_close(s);
}

/* The same seq names a collective, and a receive from each rank. */
static void names_are_told_apart(void)
{
    stage s = stage_open((stage_options){.world_size = 3});
    rc_call barrier = small_call(RC_BARRIER, NULL, 0), send = small_call(RC_SEND, data, 4000000);
    send.root = 2;
    rc_work *works[4] = {submit(s.comm, &barrier), receive(&s, 1, 0), receive(&s, 2, 0), NULL};
    static float bulk[PEER_SEGMENT * 10];
    send.src = bulk;
    send.count = CHECK_COUNT(bulk);
    works[3] = submit(s.comm, &send);
    CHECK(find(&s, 1, 0, 0) == works[0]);
    CHECK(find(&s, 2, 0, 0) == works[0]);
    CHECK(find(&s, 1, FRAME_P2P, 0) == works[1]);
    CHECK(find(&s, 2, FRAME_P2P, 0) == works[2]); /* and not the send */
    CHECK(find(&s, 1, 0, 1) == NULL);
    CHECK(find(&s, 1, FRAME_P2P, 1) == NULL);
    CHECK(find(&s, 1, FRAME_P2P, tags_name(1, 0)) == NULL);
    abandon(&s, works, 4);
}

static void works_leave_with_their_end(void)
{
    stage s = stage_open((stage_options){0});
    rc_work *works[MANY];
    for (uint32_t i = 0; i < MANY; i++)
        works[i] = receive(&s, 1, i / 3 * 5);
    rc_call call = small_call(RC_RECV, data, 1);
    call.root = 1;
    for (uint32_t i = 0; i < MANY; i += 2) {
        uint64_t name = tags_name(i / 3 * 5, i % 3);
        CHECK(find(&s, 1, FRAME_P2P, name) == works[i]);
        frame_header h = data_header(&call, name);
        h.length = 4;
        play(s.far[1][0], h, data);
        CHECK_EQ(rc_work_wait(works[i], WORLD_LONG_MS), RC_OK);
        CHECK(find(&s, 1, FRAME_P2P, name) == NULL);
    }
    for (uint32_t i = 1; i < MANY; i += 2)
        CHECK(find(&s, 1, FRAME_P2P, tags_name(i / 3 * 5, i % 3)) == works[i]);
    abandon(&s, works, MANY);
}

/* A receive from any source has no name before a send is there for it. */
static void late_receives_are_found_once_matched(void)
{
    stage s = stage_open((stage_options){.world_size = 3});
    rc_work *works[3] = {receive(&s, RC_ANY_SOURCE, 6), receive(&s, 2, 6), receive(&s, 1, 7)};
    CHECK(find(&s, 2, FRAME_P2P, tags_name(6, 0)) == NULL);
    CHECK(find(&s, 1, FRAME_P2P, tags_name(7, 0)) == works[2]);
    engine_lock(s.engine);
    CHECK(comm_active_first_unmatched(s.comm, 6) == works[0]);
    CHECK(comm_active_first_unmatched(s.comm, 7) == NULL);
    engine_unlock(s.engine);
    rc_call call = small_call(RC_RECV, data, 1);
    frame_header h = data_header(&call, tags_name(6, 0));
    h.length = 4;
    play(s.far[2][0], h, data);
    CHECK_EQ(rc_work_wait(works[0], WORLD_LONG_MS), RC_OK);
    CHECK(find(&s, 2, FRAME_P2P, tags_name(6, 0)) == NULL);
    CHECK(find(&s, 2, FRAME_P2P, tags_name(6, 1)) == works[1]);
    abandon(&s, works, 3);
}

int main(void)
{
    static const check_test tests[] = {
        {"names_are_told_apart", names_are_told_apart},
        {"works_leave_with_their_end", works_leave_with_their_end},
        {"late_receives_are_found_once_matched", late_receives_are_found_once_matched},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

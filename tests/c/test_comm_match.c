/* test_comm_match.c - which receive takes which send: tags, and receives from any source. */
#include "world.h"

enum { SMALL = 10, BULK = 1 << 20 };

static world *open_world(int size)
{
    return world_open((world_options){.size = size, .segment_bytes = 4096, .lanes = 2});
}

static rc_work *start(world *w, int rank, rc_collective kind, int peer, uint32_t tag, float *data,
                      uint64_t count)
{
    rc_call call = small_call(kind, data, count);
    call.root = peer;
    call.tag = tag;
    return submit(w->comms[rank], &call);
}

static int fill(float *data, uint64_t count, float value)
{
    for (uint64_t i = 0; i < count; i++)
        data[i] = value;
    return 1;
}

/* All that a rank may have under way to another waits for its receive; what was sent later, with
 * another tag, is received first. */
static void tags_pass_each_other(void)
{
    static float bulk[2][BULK], small[2][SMALL];
    world *w = open_world(2);
    fill(bulk[0], BULK, 1.5F);
    fill(small[0], SMALL, 2.5F);
    rc_work *first = start(w, 0, RC_SEND, 1, 7, bulk[0], BULK);
    rc_work *second = start(w, 0, RC_SEND, 1, UINT32_MAX, small[0], SMALL);
    usleep(20000);
    CHECK(expect_done(start(w, 1, RC_RECV, 0, UINT32_MAX, small[1], SMALL)));
    CHECK(small[1][SMALL - 1] == 2.5F);
    CHECK(expect_done(start(w, 1, RC_RECV, 0, 7, bulk[1], BULK)));
    CHECK(bulk[1][BULK - 1] == 1.5F);
    expect_done(first);
    expect_done(second);
    world_close(w);
}

/* Within a tag the order of the calls counts. */
static void a_tag_keeps_its_order(void)
{
    enum { ROUNDS = 300 };
    static float out[ROUNDS][SMALL], in[ROUNDS][SMALL];
    rc_work *works[2][ROUNDS];
    world *w = open_world(2);
    for (int i = 0; i < ROUNDS; i++) {
        fill(out[i], SMALL, (float)i);
        works[0][i] = start(w, 0, RC_SEND, 1, (uint32_t)(i % 40) * 1000, out[i], SMALL);
    }
    for (int tag = 39; tag >= 0; tag--)
        for (int i = tag; i < ROUNDS; i += 40)
            works[1][i] = start(w, 1, RC_RECV, 0, (uint32_t)tag * 1000, in[i], SMALL);
    for (int i = 0; i < ROUNDS; i++) {
        expect_done(works[0][i]);
        expect_done(works[1][i]);
        CHECK(in[i][0] == (float)i);
    }
    world_close(w);
}

static int source_of(rc_work *work)
{
    CHECK_EQ(rc_work_wait(work, WORLD_LONG_MS), RC_OK);
    int source = rc_work_root(work);
    rc_work_free(work);
    return source;
}

/* Before the sends are there, and after. */
static void any_source_takes_each_send_once(void)
{
    for (int late = 0; late < 2; late++) {
        static float out[4][BULK], in[3][BULK];
        world *w = open_world(4);
        rc_work *received[3], *sent[4];
        int seen[4] = {0};
        for (int i = 0; i < 3 && !late; i++)
            received[i] = start(w, 0, RC_RECV, RC_ANY_SOURCE, 3, in[i], BULK / 8);
        for (int rank = 3; rank > 0; rank--) {
            fill(out[rank], BULK / 8, (float)rank);
            sent[rank] = start(w, rank, RC_SEND, 0, 3, out[rank], BULK / 8);
        }
        usleep(20000);
        for (int i = 0; i < 3 && late; i++)
            received[i] = start(w, 0, RC_RECV, RC_ANY_SOURCE, 3, in[i], BULK / 8);
        for (int i = 0; i < 3; i++) {
            int source = source_of(received[i]);
            if (!CHECK(source > 0 && source < 4))
                break;
            CHECK_EQ(seen[source]++, 0);
            CHECK(in[i][BULK / 8 - 1] == (float)source);
        }
        for (int rank = 1; rank < 4; rank++)
            expect_done(sent[rank]);
        world_close(w);
    }
}

/* What is called after a receive from any source leaves it the send that it can take. */
static void the_first_called_goes_first(void)
{
    static float out[3][SMALL], in[3][SMALL], other[SMALL];
    world *w = open_world(2);
    rc_work *any = start(w, 0, RC_RECV, RC_ANY_SOURCE, 1, in[0], SMALL);
    rc_work *named = start(w, 0, RC_RECV, 1, 1, in[1], SMALL);
    rc_work *elsewhere = start(w, 0, RC_RECV, 1, 2, in[2], SMALL);
    fill(other, SMALL, 9.0F);
    rc_work *sent[3] = {start(w, 1, RC_SEND, 0, 2, other, SMALL)};
    CHECK(expect_done(elsewhere)); /* another tag waits for nobody */
    CHECK(in[2][0] == 9.0F);
    for (int i = 1; i < 3; i++) {
        fill(out[i], SMALL, (float)i);
        sent[i] = start(w, 1, RC_SEND, 0, 1, out[i], SMALL);
    }
    CHECK_EQ(source_of(any), 1);
    expect_done(named);
    CHECK(in[0][0] == 1.0F && in[1][0] == 2.0F);
    for (int i = 0; i < 3; i++)
        expect_done(sent[i]);
    world_close(w);
}

static rc_result result_of(rc_work *work, rc_error *error)
{
    rc_result result = rc_work_wait(work, WORLD_LONG_MS);
    rc_work_error(work, error);
    rc_work_free(work);
    return result;
}

static void nobody_sends(void)
{
    static float in[SMALL];
    rc_error error;
    world *w = open_world(3);
    rc_call call = small_call(RC_RECV, in, SMALL);
    call.root = RC_ANY_SOURCE;
    call.timeout_ms = 50;
    CHECK_EQ(result_of(submit(w->comms[0], &call), &error), RC_TIMEOUT);
    CHECK(strstr(error.message, "no send by any rank") != NULL);
    world_close(w);
}

/* A receive from any source fails when the last that could send has left, and not before. */
static void all_have_left(void)
{
    static float in[SMALL], out[SMALL];
    rc_error error;
    world *w = open_world(3);
    rc_work *first = start(w, 0, RC_RECV, RC_ANY_SOURCE, 0, in, SMALL);
    rc_comm_close(w->comms[1], 1000);
    usleep(20000);
    CHECK_EQ(rc_work_wait(first, 0), RC_AGAIN);
    expect_done(start(w, 2, RC_SEND, 0, 0, out, SMALL));
    CHECK_EQ(source_of(first), 2);
    rc_work *second = start(w, 0, RC_RECV, RC_ANY_SOURCE, 0, in, SMALL);
    rc_comm_close(w->comms[2], 1000);
    CHECK_EQ(result_of(second, &error), RC_PEER_LOST);
    world_close(w);
}

/* A finished work can be asked for a notice, and one in flight. */
static void notices_are_asked_for_later(void)
{
    static float out[2][SMALL], in[2][SMALL];
    world *w = open_world(2);
    rc_work *taken = NULL;
    for (int i = 0; i < 2; i++) {
        rc_work *sent = start(w, 1, RC_SEND, 0, 0, out[i], SMALL);
        rc_work *received = start(w, 0, RC_RECV, 1, 0, in[i], SMALL);
        if (i == 0)
            CHECK_EQ(rc_work_wait(received, WORLD_LONG_MS), RC_OK);
        CHECK_EQ(rc_work_notify(received), RC_OK);
        CHECK_EQ(rc_engine_take_done(w->engines[0], WORLD_LONG_MS, &taken), RC_OK);
        CHECK(taken == received);
        rc_work_free(taken);
        expect_done(sent);
        expect_done(received);
    }
    CHECK_EQ(rc_engine_take_done(w->engines[0], 0, &taken), RC_AGAIN);
    world_close(w);
}

int main(void)
{
    static const check_test tests[] = {
        {"tags_pass_each_other", tags_pass_each_other},
        {"a_tag_keeps_its_order", a_tag_keeps_its_order},
        {"any_source_takes_each_send_once", any_source_takes_each_send_once},
        {"the_first_called_goes_first", the_first_called_goes_first},
        {"nobody_sends", nobody_sends},
        {"all_have_left", all_have_left},
        {"notices_are_asked_for_later", notices_are_asked_for_later},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

/* test_work.c - the work machine: every collective, and frames that no correct peer sends. */
#include "../../csrc/coll/joined.h"
#include "bag.h"

/* ---- all collectives ---- */

static void algorithms(void)
{
    for (int a = RC_DIRECT; a <= RC_ONE_SHOT; a++) {
        algorithm = (rc_algorithm)a;
        every_kind(RC_ALLREDUCE, 8);
    }
    algorithm = RC_RING;
}

static void reductions(void)
{
    every_kind(RC_ALLREDUCE, 8);
    every_kind(RC_REDUCE_SCATTER, 4);
    every_kind(RC_REDUCE, 4);
}

/* With every op: one that does not reduce ignores it. */
static void copies(void)
{
    for (int collective = RC_ALLGATHER; collective <= RC_ALLTOALL; collective++)
        if (collective != RC_REDUCE)
            every_kind((rc_collective)collective, 2);
    every_kind(RC_SEND, 2);
}

static void barrier(void)
{
    for (int n = 1; n <= MAX_WORLD; n++) {
        trial t = {.call = {.collective = RC_BARRIER}, .world_size = n};
        run_trial(&t);
    }
}

/* The reference knows no segments, so the result must be the same however the tensor is cut. */
static void bits_do_not_depend_on_segments(void)
{
    trial t = {.call = {.collective = RC_ALLREDUCE, .dtype = RC_F32, .count = MOST},
               .world_size = 4};
    for (int a = RC_RING; a < RC_ALGORITHM_COUNT; a++)
        for (segment_bytes = 1024; segment_bytes <= SEGMENT; segment_bytes *= 2)
            for (int codec = 0; codec <= RC_CODEC_FP16; codec++) {
                algorithm = (rc_algorithm)a;
                t.call.codec = (rc_codec)codec;
                t.world_size = 4 + a % 3;
                run_trial(&t);
            }
    algorithm = RC_RING;
    segment_bytes = SEGMENT;
}

/* ---- when a sum is made ---- */

enum { RANKS = 3, SUMMANDS = 700, FEW = 5 };

/* Rank 0 owns part 0, and passes it on when both others have brought theirs. */
static void an_owner_passes_its_result_on(void)
{
    algorithm = RC_DIRECT;
    open_sum(RANKS, SUMMANDS, RC_CODEC_NONE);
    int before = bag_count;
    CHECK(deliver_from_to(1, 0));
    collect();
    CHECK_EQ(bag_count, before - 1);
    CHECK_EQ(summands[0][0], 1);
    CHECK(deliver_from_to(2, 0));
    collect();
    CHECK_EQ(bag_count, before - 2 + 2);
    CHECK_EQ(summands[0][0], 6);
    close_sum(SUMMANDS);
}

static void open_one_shot(rc_codec codec)
{
    algorithm = RC_ONE_SHOT;
    open_sum(RANKS, FEW, codec);
    CHECK_EQ(bag_count, RANKS * (RANKS - 1));
}

static void a_plain_one_is_sent_from_src(void)
{
    open_one_shot(RC_CODEC_NONE);
    CHECK(joined_sends_src(sides[0].work));
    for (int i = 0; i < bag_count; i++)
        CHECK(bag[i].frame->payload == (const uint8_t *)summands[bag[i].from]);
    close_sum(FEW);
}

/* All others' values are there: in place, the result must wait until its own have left for all. */
static void the_join_waits_until_it_has_left(void)
{
    open_one_shot(RC_CODEC_NONE);
    CHECK(deliver_from_to(1, 0));
    CHECK(deliver_from_to(2, 0));
    CHECK_EQ(summands[0][0], 1);
    CHECK(deliver_from_to(0, 1));
    CHECK_EQ(summands[0][0], 1);
    CHECK(!work_complete(sides[0].work));
    CHECK(deliver_from_to(0, 2));
    CHECK_EQ(summands[0][0], 6);
    CHECK(work_complete(sides[0].work));
    close_sum(FEW);
}

static void it_may_leave_before_others_come(void)
{
    open_one_shot(RC_CODEC_NONE);
    CHECK(deliver_from_to(0, 1));
    CHECK(deliver_from_to(0, 2));
    CHECK(deliver_from_to(1, 0));
    CHECK_EQ(summands[0][0], 1);
    CHECK(deliver_from_to(2, 0));
    CHECK_EQ(summands[0][0], 6);
    close_sum(FEW);
}

static void an_encoded_one_is_kept_in_a_buffer(void)
{
    open_one_shot(RC_CODEC_BF16);
    CHECK(!joined_sends_src(sides[0].work));
    CHECK(deliver_from_to(1, 0));
    CHECK_EQ(summands[0][0], 1);
    CHECK(deliver_from_to(2, 0));
    CHECK_EQ(summands[0][0], 6); /* though it has left for nobody yet */
    CHECK(!work_complete(sides[0].work));
    close_sum(FEW);
}

/* ---- frames that no correct peer sends ---- */

/* Whatever is kept or under way when a work fails, its buffers are given back. */
static void nothing_is_kept_of_a_failed_work(void)
{
    static float src[5][MOST], dst[5][MOST];
    for (int a = RC_RING; a < RC_ALGORITHM_COUNT; a++)
        for (int codec = 0; codec <= RC_CODEC_FP16; codec++)
            for (int delivered = 0; delivered < 40; delivered += 3) {
                algorithm = (rc_algorithm)a;
                open_world(5);
                for (int rank = 0; rank < 5; rank++) {
                    rc_call call = {.collective = RC_ALLREDUCE,
                                    .dtype = RC_F32,
                                    .codec = (rc_codec)codec,
                                    .count = MOST,
                                    .src = src[rank],
                                    .dst = dst[rank]};
                    start(rank, &call);
                }
                for (int i = 0; i < delivered; i++) {
                    collect();
                    if (bag_count > 0)
                        deliver((int)draw_below(&seed, (uint64_t)bag_count));
                }
                for (int rank = 0; rank < 5; rank++)
                    abandon(&sides[rank]);
                close_world();
            }
    algorithm = RC_RING;
}

static int takes(side *s, const frame_header *h, int from)
{
    rx_place place = {0};
    rc_error why;
    error_clear(&why);
    rc_result result = work_begin(s->work, h, from, &place, &why);
    CHECK_EQ(why.code, result);
    CHECK(result == RC_OK || result == RC_PROTOCOL);
    pool_return(&s->buffers, place.buffer);
    return result == RC_OK;
}

/* How many of all small headers are taken. */
static int count_taken(side *s)
{
    const plan *p = &s->work->plan;
    int taken = 0;
    for (uint32_t chunk = 0; chunk < p->chunks + 2; chunk++)
        for (uint32_t step = 0; step < 2 * (uint32_t)p->world_size; step++)
            for (uint32_t segment = 0; segment < 6; segment++)
                for (int from = 0; from < p->world_size; from++) {
                    frame_header h = {.type = FRAME_DATA,
                                      .chunk = chunk,
                                      .segment = segment,
                                      .step = (uint16_t)step};
                    if (chunk < p->chunks)
                        h.length = (uint32_t)(4 * plan_segment_elems(p, chunk, segment));
                    taken += takes(s, &h, from);
                }
    return taken;
}

static void expected_frames_are_taken(void)
{
    enum { N = 4, COUNT = 1100 };
    static float src[N * COUNT], dst[N * COUNT];
    for (int collective = 0; collective <= RC_BARRIER; collective++) {
        rc_call call = {.collective = (rc_collective)collective,
                        .dtype = RC_F32,
                        .root = 1,
                        .count = COUNT,
                        .src = src,
                        .dst = dst};
        if (collective == RC_ALLREDUCE)
            call.count = N * COUNT;
        if (collective == RC_BARRIER)
            call.count = 0;
        open_world(N);
        for (int rank = 0; rank < N; rank++)
            start(rank, &call);
        for (int rank = 0; rank < N; rank++)
            CHECK_EQ(count_taken(&sides[rank]), sides[rank].work->receives_left);
        for (int rank = 0; rank < N; rank++)
            abandon(&sides[rank]);
        close_world();
    }
}

static void only_expected_frames_are_taken(void)
{
    for (int a = RC_RING; a < RC_ALGORITHM_COUNT; a++) {
        algorithm = (rc_algorithm)a;
        expected_frames_are_taken();
    }
    algorithm = RC_RING;
}

static void lengths_must_be_exact(void)
{
    static float data[1000];
    rc_call call = {.collective = RC_RECV, .dtype = RC_F32, .count = 1000, .root = 1, .dst = data};
    open_world(2);
    start(0, &call);
    for (uint32_t length = 0; length <= SEGMENT; length++) {
        frame_header h = {.type = FRAME_DATA, .flags = FRAME_P2P, .length = length};
        CHECK_EQ(takes(&sides[0], &h, 1), length == sizeof data);
    }
    abandon(&sides[0]);
    close_world();
}

int main(void)
{
    static const check_test tests[] = {
        {"reductions", reductions},
        {"algorithms", algorithms},
        {"copies", copies},
        {"barrier", barrier},
        {"bits_do_not_depend_on_segments", bits_do_not_depend_on_segments},
        {"an_owner_passes_its_result_on", an_owner_passes_its_result_on},
        {"a_plain_one_is_sent_from_src", a_plain_one_is_sent_from_src},
        {"the_join_waits_until_it_has_left", the_join_waits_until_it_has_left},
        {"it_may_leave_before_others_come", it_may_leave_before_others_come},
        {"an_encoded_one_is_kept_in_a_buffer", an_encoded_one_is_kept_in_a_buffer},
        {"only_expected_frames_are_taken", only_expected_frames_are_taken},
        {"lengths_must_be_exact", lengths_must_be_exact},
        {"nothing_is_kept_of_a_failed_work", nothing_is_kept_of_a_failed_work},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

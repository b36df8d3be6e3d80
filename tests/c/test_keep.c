/* test_keep.c - what stays with a rank of its own values is copied piece by piece, and right
 * whatever goes on in between.
 */
#include "../../csrc/coll/keep.h"
#include "bag.h"

enum { PIECE = KEEP_PIECE_BYTES / 4, MANY = 3 * PIECE + 77 }; /* floats */

static float src[MANY + 1000], dst[MANY + 1000];

static void draw_src(void)
{
    for (size_t i = 0; i < CHECK_COUNT(src); i++)
        src[i] = (float)(i % 8191);
}

static rc_call call_of(rc_collective collective, uint64_t count)
{
    return (rc_call){
        .collective = collective, .dtype = RC_F32, .count = count, .src = src, .dst = dst};
}

static uint64_t count_copied(uint64_t count)
{
    uint64_t copied = 0;
    for (uint64_t i = 0; i < count; i++)
        copied += dst[i] == src[i];
    return copied;
}

/* No step of the engine's takes longer than a piece. */
static void a_piece_at_a_time(void)
{
    draw_src();
    for (int collective = 0; collective <= RC_ALLTOALL; collective++) {
        rc_call call = call_of((rc_collective)collective, MANY);
        memset(dst, 0xff, sizeof dst); /* NaN */
        open_world(1);
        start(0, &call);
        rc_work *w = sides[0].work;
        for (uint64_t there = PIECE; there < MANY; there += PIECE) {
            CHECK_EQ(count_copied(MANY), there);
            CHECK(keep_is_left(w));
            CHECK(!work_complete(w));
            keep_some(w);
        }
        CHECK_EQ(count_copied(MANY), MANY);
        CHECK(dst[MANY] != dst[MANY]);
        CHECK(!keep_is_left(w));
        end_work(&sides[0]);
        close_world();
    }
}

static void what_is_little_is_there_at_once(void)
{
    draw_src();
    static const uint64_t counts_here[] = {0, 1, PIECE};
    for (size_t c = 0; c < CHECK_COUNT(counts_here); c++) {
        rc_call call = call_of(RC_ALLREDUCE, counts_here[c]);
        memset(dst, 0xff, sizeof dst);
        open_world(1);
        start(0, &call);
        CHECK(!keep_is_left(sides[0].work));
        CHECK_EQ(count_copied(counts_here[c]), counts_here[c]);
        end_work(&sides[0]);
        close_world();
    }
}

static void nothing_is_copied_in_place(void)
{
    rc_call call = call_of(RC_ALLREDUCE, MANY);
    call.dst = src;
    open_world(1);
    start(0, &call);
    CHECK(!keep_is_left(sides[0].work));
    end_work(&sides[0]);
    close_world();
}

/* One rank's src and dst may overlap as they like. */
static void overlaps(void)
{
    static const int distances[] = {-900, -1, 1, 500, 900};
    static float want[MANY];
    for (size_t d = 0; d < CHECK_COUNT(distances); d++) {
        draw_src();
        rc_call call = call_of(RC_ALLREDUCE, MANY);
        float *from = distances[d] < 0 ? src - distances[d] : src;
        call.src = from;
        call.dst = from + distances[d];
        memcpy(want, from, sizeof want);
        open_world(1);
        start(0, &call);
        while (keep_one(0))
            continue;
        CHECK(memcmp(call.dst, want, sizeof want) == 0);
        end_work(&sides[0]);
        close_world();
    }
}

/* In any order with what arrives and what leaves; as others decode it, where it is encoded. */
static void beside_the_frames(void)
{
    for (int collective = RC_ALLGATHER; collective <= RC_ALLTOALL; collective++)
        for (int codec = 0; codec <= RC_CODEC_BF16; codec++)
            for (int n = 1; n <= 2; n++) {
                rc_call call = {.collective = (rc_collective)collective,
                                .dtype = RC_F32,
                                .codec = (rc_codec)codec,
                                .count = 2 * PIECE + 5};
                trial t = trial_draw(call, n, &seed);
                run_trial(&t);
            }
}

static void a_failed_work_leaves_the_rest(void)
{
    draw_src();
    rc_call call = call_of(RC_ALLREDUCE, MANY);
    memset(dst, 0xff, sizeof dst);
    open_world(1);
    start(0, &call);
    rc_work *w = sides[0].work;
    work_retain(w);
    abandon(&sides[0]);
    CHECK(!keep_is_left(w));
    keep_some(w);
    CHECK_EQ(count_copied(MANY), PIECE);
    work_release(w);
    close_world();
}

int main(void)
{
    static const check_test tests[] = {
        {"a_piece_at_a_time", a_piece_at_a_time},
        {"what_is_little_is_there_at_once", what_is_little_is_there_at_once},
        {"nothing_is_copied_in_place", nothing_is_copied_in_place},
        {"overlaps", overlaps},
        {"beside_the_frames", beside_the_frames},
        {"a_failed_work_leaves_the_rest", a_failed_work_leaves_the_rest},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

/* test_work.c - the work machine over a simulated transport: frames of all ranks lie in one bag and
 * are delivered in random order, each as late as it may be. Results are compared with
 * collective.h bit for bit.
 *
 * A payload may be borrowed from the caller's memory until its frame is released, so it is compared
 * between the moment at which a lane would compute its CRC and the moment of delivery.
 */
#include "../../csrc/coll/work.h"

#include "../../csrc/base/error.h"
#include "check.h"
#include "trial.h"

enum { MAX_WORLD = 8, SEGMENT = 4096, MOST = 3000, BAG = 4096 };

typedef struct flight {
    out_frame *frame;
    int from, to;
    uint8_t payload[SEGMENT]; /* as it was when the frame was prepared */
} flight;

typedef struct side {
    work_env env;
    pool buffers;
    out_frame *frames;
    peer_link links[MAX_WORLD];
    peer_link *by_rank[MAX_WORLD];
    rc_work *work;
} side;

static rc_engine engine; /* only its kernels are used */
static side sides[MAX_WORLD];
static flight bag[BAG];
static int bag_count;
static int world_size;
static uint32_t segment_bytes = SEGMENT;
static rc_algorithm algorithm = RC_RING;
static uint64_t seed = 2463534242u;

/* ---- a world without sockets ---- */

static void open_world(int n)
{
    world_size = n;
    bag_count = 0;
    engine.kernels = kernels_find(NULL);
    for (int rank = 0; rank < n; rank++) {
        side *s = &sides[rank];
        *s = (side){.env = {.engine = &engine,
                            .rank = rank,
                            .world_size = n,
                            .contributors = n,
                            .buffers = &s->buffers,
                            .frames = &s->frames,
                            .epoch = 1,
                            .segment_bytes = segment_bytes,
                            .algorithm = algorithm,
                            .links = s->by_rank}};
        pool_init(&s->buffers, SEGMENT, 4);
        for (int peer = 0; peer < n; peer++) {
            s->links[peer] =
                (peer_link){.peer = peer, .credit = UINT32_MAX}; /* no lane: it queues */
            s->by_rank[peer] = peer == rank ? NULL : &s->links[peer];
        }
    }
}

static void close_world(void)
{
    for (int rank = 0; rank < world_size; rank++) {
        CHECK_EQ(sides[rank].buffers.taken, 0);
        work_env_destroy(&sides[rank].env);
    }
}

/* Moves what the ranks have queued into the bag. */
static void collect(void)
{
    for (int from = 0; from < world_size; from++)
        for (int to = 0; to < world_size; to++) {
            out_frame *frame;
            while ((frame = queue_pop(&sides[from].links[to].queue)) != NULL) {
                CHECK(work_env_encode(&sides[from].env, frame));
                flight *f = &bag[bag_count++];
                *f = (flight){.frame = frame, .from = from, .to = to};
                if (frame->header.length > 0)
                    memcpy(f->payload, frame->payload, frame->header.length);
            }
        }
}

static rc_result receive(int to, const frame_header *h, int from, const uint8_t *payload)
{
    rx_place place = {0};
    rc_error why;
    error_clear(&why);
    rc_result result = work_begin(sides[to].work, h, from, &place, &why);
    if (result != RC_OK)
        return result;
    if (h->length > 0)
        memcpy(place.data, payload, h->length);
    return work_end(sides[to].work, h, &place);
}

/* Delivers one frame of the bag, and only then lets its sender have it back. */
static void deliver(int index)
{
    flight *f = &bag[index];
    frame_header h = f->frame->header;
    if (h.length > 0)
        CHECK(memcmp(f->payload, f->frame->payload, h.length) == 0);
    CHECK_EQ(receive(f->to, &h, f->from, f->payload), RC_OK);
    CHECK_EQ(receive(f->to, &h, f->from, f->payload), RC_PROTOCOL); /* it came twice */
    work_env_release(&sides[f->from].env, f->frame);
    *f = bag[--bag_count];
}

static void start(int rank, const rc_call *call)
{
    side *s = &sides[rank];
    s->work = work_create(&engine, call, 0);
    CHECK_EQ(work_start(s->work, &s->env), RC_OK);
}

static void end_work(side *s)
{
    CHECK(work_complete(s->work));
    work_finish(s->work, RC_OK, NULL);
    work_release(s->work);
    work_release(s->work);
    s->work = NULL;
}

/* ---- one collective ---- */

static void run_trial(trial *t)
{
    t->algorithm = algorithm;
    open_world(t->world_size);
    trial_open(t, &seed);
    for (int rank = 0; rank < t->world_size; rank++) {
        rc_call call = trial_call(t, rank);
        if (trial_takes_part(t, rank))
            start(rank, &call);
    }
    for (collect(); bag_count > 0; collect())
        deliver((int)draw_below(&seed, (uint64_t)bag_count));
    for (int rank = 0; rank < t->world_size; rank++) {
        if (trial_takes_part(t, rank))
            end_work(&sides[rank]);
        trial_check(t, rank);
    }
    trial_close(t);
    close_world();
}

/* ---- all collectives ---- */

static const uint64_t counts[] = {0, 1, 4, 5, 255, 256, 257, 1000, MOST};

static void run_drawn(rc_call call)
{
    int least = collective_is_p2p(call.collective) ? 2 : 1;
    int n = least + (int)draw_below(&seed, (uint64_t)(MAX_WORLD + 1 - least));
    call.count = counts[draw_below(&seed, CHECK_COUNT(counts))];
    trial t = trial_draw(call, n, &seed);
    run_trial(&t);
}

static void every_kind(rc_collective collective, int rounds)
{
    for (int round = 0; round < rounds; round++)
        for (int dtype = 0; dtype < RC_DTYPE_COUNT; dtype++)
            for (int op = 0; op < RC_OP_COUNT; op++)
                for (int codec = 0; codec < RC_CODEC_COUNT; codec++)
                    if (codec_supports((rc_codec)codec, (rc_dtype)dtype))
                        run_drawn((rc_call){.collective = collective,
                                            .op = (rc_op)op,
                                            .dtype = (rc_dtype)dtype,
                                            .codec = (rc_codec)codec});
}

static void algorithms(void)
{
    for (int a = RC_DIRECT; a < RC_ALGORITHM_COUNT; a++) {
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
    for (segment_bytes = 1024; segment_bytes <= SEGMENT; segment_bytes *= 2)
        for (int codec = 0; codec < RC_CODEC_COUNT; codec++) {
            t.call.codec = (rc_codec)codec;
            run_trial(&t);
        }
    segment_bytes = SEGMENT;
}

/* ---- frames that no correct peer sends ---- */

/* Ends a work as a failure does: with its frames out of all queues. */
static void abandon(side *s)
{
    rc_error error = {.code = RC_ABORTED};
    for (collect(); bag_count > 0; bag_count--)
        work_env_release(&sides[bag[bag_count - 1].from].env, bag[bag_count - 1].frame);
    work_finish(s->work, RC_ABORTED, &error);
    CHECK_EQ(s->work->error.code, RC_ABORTED);
    work_release(s->work);
    work_release(s->work);
}

/* Whatever is kept or under way when a work fails, its buffers are given back. */
static void nothing_is_kept_of_a_failed_work(void)
{
    static float src[5][MOST], dst[5][MOST];
    for (int a = RC_RING; a < RC_ALGORITHM_COUNT; a++)
        for (int codec = 0; codec < RC_CODEC_COUNT; codec++)
            for (int delivered = 0; delivered < 12; delivered++) {
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
        {"only_expected_frames_are_taken", only_expected_frames_are_taken},
        {"lengths_must_be_exact", lengths_must_be_exact},
        {"nothing_is_kept_of_a_failed_work", nothing_is_kept_of_a_failed_work},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

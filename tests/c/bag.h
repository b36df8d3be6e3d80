/* bag.h - ranks over a simulated transport: frames of all of them lie in one bag and are delivered
 * in random order, each as late as it may be. Results are compared with collective.h bit for bit.
 *
 * A payload may be borrowed from the caller's memory until its frame is released, so it is compared
 * between the moment at which a lane would compute its CRC and the moment of delivery.
 */
#ifndef RINGCOMM_TEST_BAG_H
#define RINGCOMM_TEST_BAG_H

#include "../../csrc/base/error.h"
#include "../../csrc/coll/work.h"
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

static inline void open_world(int n)
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

static inline void close_world(void)
{
    for (int rank = 0; rank < world_size; rank++) {
        CHECK_EQ(sides[rank].buffers.taken, 0);
        work_env_destroy(&sides[rank].env);
    }
}

/* Moves what the ranks have queued into the bag. */
static inline void collect(void)
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

static inline rc_result receive(int to, const frame_header *h, int from, const uint8_t *payload)
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
static inline void deliver(int index)
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

static inline void start(int rank, const rc_call *call)
{
    side *s = &sides[rank];
    s->work = work_create(&engine, call, 0);
    CHECK_EQ(work_start(s->work, &s->env), RC_OK);
}

/* As the engine goes round. 0 if there was nothing to keep. */
static inline int keep_one(int rank)
{
    rc_work *w = sides[rank].work;
    if (w == NULL || !keep_is_left(w))
        return 0;
    CHECK(!work_complete(w));
    keep_some(w);
    return 1;
}

static inline void end_work(side *s)
{
    CHECK(work_complete(s->work));
    work_finish(s->work, RC_OK, NULL);
    work_release(s->work);
    work_release(s->work);
    s->work = NULL;
}

/* ---- one collective ---- */

static inline void run_trial(trial *t)
{
    t->algorithm = algorithm;
    open_world(t->world_size);
    trial_open(t, &seed);
    for (int rank = 0; rank < t->world_size; rank++) {
        rc_call call = trial_call(t, rank);
        if (trial_takes_part(t, rank))
            start(rank, &call);
    }
    for (collect(); bag_count > 0; collect()) {
        keep_one((int)draw_below(&seed, (uint64_t)t->world_size));
        deliver((int)draw_below(&seed, (uint64_t)bag_count));
    }
    for (int rank = 0; rank < t->world_size; rank++) {
        while (keep_one(rank))
            continue;
        if (trial_takes_part(t, rank))
            end_work(&sides[rank]);
        trial_check(t, rank);
    }
    trial_close(t);
    close_world();
}

static const uint64_t counts[] = {0, 1, 4, 5, 255, 256, 257, 1000, MOST};

static inline void run_drawn(rc_call call)
{
    int least = collective_is_p2p(call.collective) ? 2 : 1;
    int n = least + (int)draw_below(&seed, (uint64_t)(MAX_WORLD + 1 - least));
    call.count = counts[draw_below(&seed, CHECK_COUNT(counts))];
    trial t = trial_draw(call, n, &seed);
    run_trial(&t);
}

static inline void every_kind(rc_collective collective, int rounds)
{
    for (int round = 0; round < rounds; round++)
        for (int dtype = 0; dtype < RC_DTYPE_COUNT; dtype++)
            for (int op = 0; op < RC_OP_COUNT; op++)
                for (int codec = 0; codec <= RC_CODEC_FP16; codec++)
                    if (codec_supports((rc_codec)codec, (rc_dtype)dtype))
                        run_drawn((rc_call){.collective = collective,
                                            .op = (rc_op)op,
                                            .dtype = (rc_dtype)dtype,
                                            .codec = (rc_codec)codec});
}

/* ---- a sum whose steps a test takes by itself ---- */

static float summands[MAX_WORLD][MOST];

/* All ranks call it in place; rank r has r + 1 everywhere. */
static inline void open_sum(int n, uint64_t count, rc_codec codec)
{
    open_world(n);
    for (int rank = 0; rank < n; rank++) {
        for (uint64_t i = 0; i < count; i++)
            summands[rank][i] = (float)(rank + 1);
        rc_call call = {.collective = RC_ALLREDUCE,
                        .dtype = RC_F32,
                        .codec = codec,
                        .count = count,
                        .src = summands[rank],
                        .dst = summands[rank]};
        start(rank, &call);
    }
    collect();
}

/* Delivers the first frame from one rank to another. 0 if there is none. */
static inline int deliver_from_to(int from, int to)
{
    for (int i = 0; i < bag_count; i++)
        if (bag[i].from == from && bag[i].to == to) {
            deliver(i);
            return 1;
        }
    return 0;
}

/* Delivers what is left. */
static inline void close_sum(uint64_t count)
{
    for (; bag_count > 0; collect())
        deliver(0);
    for (int rank = 0; rank < world_size; rank++) {
        for (uint64_t i = 0; i < count; i++)
            CHECK_EQ(summands[rank][i], world_size * (world_size + 1) / 2);
        end_work(&sides[rank]);
    }
    close_world();
    algorithm = RC_RING;
}

/* Ends a work as a failure does: with its frames out of all queues. */
static inline void abandon(side *s)
{
    rc_error error = {.code = RC_ABORTED};
    for (collect(); bag_count > 0; bag_count--)
        work_env_release(&sides[bag[bag_count - 1].from].env, bag[bag_count - 1].frame);
    work_finish(s->work, RC_ABORTED, &error);
    CHECK_EQ(s->work->error.code, RC_ABORTED);
    work_release(s->work);
    work_release(s->work);
}

#endif

/* test_gated.c - works whose source comes bit by bit: nothing of it is read before it is there, the
 * bits are those of any work, and what is called final is so. */
#include "../../csrc/coll/gated.h"
#include "bag.h"

enum { POISON = 0xff, SHOWN = 256, LEAST = 300, ENOUGH = 1100 };

/* What is still to be shown of each rank's source, and what has been taken of its result. */
typedef struct source {
    uint8_t *at;
    order_stretch parts[SHOWN];
    int count;
    uint8_t taken[MOST];
} source;

static source sources[MAX_WORLD];

static gate *make_gate(void)
{
    return gate_create(SHOWN, LEAST, ENOUGH);
}

static void hide(const trial *t, int rank)
{
    source *s = &sources[rank];
    size_t size = dtype_bytes(t->call.dtype);
    *s = (source){.at = t->in_place ? t->dst[rank] : t->src[rank]};
    memset(s->at, POISON, t->call.count * size);
    for (uint64_t at = 0; at < t->call.count; at += s->parts[s->count++].elems) {
        uint64_t elems = 1 + draw_below(&seed, s->count < 100 ? 600 : MOST), left = t->call.count;
        left -= at;
        s->parts[s->count] = (order_stretch){at, elems < left ? elems : left};
    }
}

/* Any stretch that is left. */
static void show_some(const trial *t, int rank, gate *g)
{
    source *s = &sources[rank];
    if (s->count == 0)
        return;
    int which = (int)draw_below(&seed, (uint64_t)s->count);
    order_stretch one = s->parts[which];
    size_t size = dtype_bytes(t->call.dtype);
    s->parts[which] = s->parts[--s->count];
    memcpy(s->at + one.start * size, t->before[rank] + one.start * size, one.elems * size);
    gate_show(g, one);
}

/* What is final has its last value. */
static void take_final(const trial *t, int rank, gate *g)
{
    size_t size = dtype_bytes(t->call.dtype);
    order_stretch one;
    while (gate_take(g, &one)) {
        CHECK(memcmp(t->dst[rank] + one.start * size, t->want[rank] + one.start * size,
                     one.elems * size) == 0);
        for (uint64_t i = 0; i < one.elems; i++)
            CHECK(!sources[rank].taken[one.start + i]++);
    }
}

static void begin(const trial *t, int rank)
{
    side *s = &sides[rank];
    rc_call call = trial_call(t, rank);
    gate *g = make_gate();
    hide(t, rank);
    for (uint64_t some = draw_below(&seed, 3); some > 0; some--)
        show_some(t, rank, g);
    s->work = work_create(&engine, &call, 0);
    s->work->gate = g;
    CHECK_EQ(work_start(s->work, &s->env), RC_OK);
}

/* One thing happens. 0: there is nothing left. */
static int step(const trial *t)
{
    int rank = (int)draw_below(&seed, (uint64_t)t->world_size), left = 0;
    gate *g = sides[rank].work->gate;
    switch (draw_below(&seed, 6)) {
    case 0: show_some(t, rank, g); break;
    case 1: CHECK_EQ(work_go_on(sides[rank].work), RC_OK); break;
    case 2: take_final(t, rank, g); break;
    default:
        collect();
        if (bag_count > 0)
            deliver((int)draw_below(&seed, (uint64_t)bag_count));
    }
    collect();
    for (int other = 0; other < t->world_size; other++)
        left += sources[other].count + work_may_go_on(sides[other].work);
    return left + bag_count;
}

static void check_taken(const trial *t, int rank)
{
    for (uint64_t i = 0; i < t->call.count; i++)
        CHECK(sources[rank].taken[i]);
}

static void run_gated(trial *t)
{
    t->algorithm = algorithm;
    open_world(t->world_size);
    trial_open(t, &seed);
    for (int rank = 0; rank < t->world_size; rank++)
        begin(t, rank);
    while (step(t))
        continue;
    for (int rank = 0; rank < t->world_size; rank++) {
        rc_work *w = sides[rank].work;
        work_retain(w);
        take_final(t, rank, w->gate);
        check_taken(t, rank);
        CHECK_EQ(w->gate->unfinal, 0);
        end_work(&sides[rank]);
        order_stretch none;
        CHECK(!gate_take(w->gate, &none));
        work_release(w);
        trial_check(t, rank);
    }
    trial_close(t);
    close_world();
}

static void every_gated_kind(rc_algorithm a, int rounds)
{
    algorithm = a;
    for (int round = 0; round < rounds; round++)
        for (int dtype = 0; dtype < RC_DTYPE_COUNT; dtype++)
            for (int op = 0; op < RC_OP_COUNT; op++)
                for (int codec = 0; codec <= RC_CODEC_FP16; codec++) {
                    rc_call call = {.collective = RC_ALLREDUCE,
                                    .op = (rc_op)op,
                                    .dtype = (rc_dtype)dtype,
                                    .codec = (rc_codec)codec,
                                    .count = counts[1 + draw_below(&seed, 8)]};
                    if (!codec_supports(call.codec, call.dtype))
                        continue;
                    trial t = trial_draw(call, 2 + (int)draw_below(&seed, 4), &seed);
                    run_gated(&t);
                }
    algorithm = RC_RING;
}

static void a_ring(void)
{
    every_gated_kind(RC_RING, 4);
}

static void direct(void)
{
    every_gated_kind(RC_DIRECT, 4);
}

static void one_shot(void)
{
    every_gated_kind(RC_ONE_SHOT, 4);
}

/* Some ranks have a gate and others do not. */
static void others_cannot_tell(void)
{
    static const rc_algorithm all[] = {RC_RING, RC_DIRECT, RC_ONE_SHOT};
    for (size_t a = 0; a < CHECK_COUNT(all); a++)
        for (int gated = 0; gated < 4; gated++) {
            rc_call call = {.collective = RC_ALLREDUCE, .dtype = RC_F32, .count = MOST};
            trial t = trial_draw(call, 4, &seed);
            algorithm = t.algorithm = all[a];
            open_world(4);
            trial_open(&t, &seed);
            for (int rank = 0; rank < 4; rank++) {
                call = trial_call(&t, rank);
                if (rank == gated)
                    begin(&t, rank);
                else
                    start(rank, &call);
            }
            rc_work *w = sides[gated].work;
            for (int moved = 1; moved;) {
                collect();
                moved = bag_count > 0;
                if (moved)
                    deliver((int)draw_below(&seed, (uint64_t)bag_count));
                if (!moved && sources[gated].count > 0) {
                    show_some(&t, gated, w->gate);
                    while (work_may_go_on(w))
                        CHECK_EQ(work_go_on(w), RC_OK);
                    moved = 1;
                }
            }
            for (int rank = 0; rank < 4; rank++) {
                end_work(&sides[rank]);
                trial_check(&t, rank);
            }
            trial_close(&t);
            close_world();
        }
    algorithm = RC_RING;
}

/* Buffers that are held are given back, whenever that is. */
static void a_failure_behind_a_gate(void)
{
    for (int a = RC_RING; a <= RC_ONE_SHOT; a++)
        for (int codec = 0; codec <= RC_CODEC_FP16; codec++)
            for (int steps = 0; steps < 60; steps += 3) {
                rc_call call = {.collective = RC_ALLREDUCE,
                                .dtype = RC_F32,
                                .codec = (rc_codec)codec,
                                .count = MOST};
                trial t = trial_draw(call, 4, &seed);
                algorithm = t.algorithm = (rc_algorithm)a;
                open_world(4);
                trial_open(&t, &seed);
                for (int rank = 0; rank < 4; rank++)
                    begin(&t, rank);
                for (int i = 0; i < steps && step(&t); i++)
                    continue;
                for (int rank = 0; rank < 4; rank++)
                    abandon(&sides[rank]);
                trial_close(&t);
                close_world();
            }
    algorithm = RC_RING;
}

/* A result that cannot be one: it would be written while the source is. */
static void a_result_without_this_rank(void)
{
    static float data[MOST];
    rc_call call = {
        .collective = RC_ALLREDUCE, .dtype = RC_F32, .count = MOST, .src = data, .dst = data};
    open_world(2);
    side *s = &sides[0];
    s->work = work_create(&engine, &call, 0);
    s->work->gate = make_gate();
    CHECK_EQ(work_start(s->work, &s->env), RC_OK);
    frame_header h = {.type = FRAME_DATA,
                      .chunk = 0,
                      .step = 1,
                      .length = (uint32_t)(4 * plan_segment_elems(&s->work->plan, 0, 0))};
    rx_place place = {0};
    rc_error why;
    error_clear(&why);
    CHECK_EQ(work_begin(s->work, &h, 1, &place, &why), RC_PROTOCOL);
    CHECK(strstr(why.message, "without this rank's part") != NULL);
    abandon(s);
    close_world();
}

int main(void)
{
    static const check_test tests[] = {
        {"a_ring", a_ring},
        {"direct", direct},
        {"one_shot", one_shot},
        {"others_cannot_tell", others_cannot_tell},
        {"a_failure_behind_a_gate", a_failure_behind_a_gate},
        {"a_result_without_this_rank", a_result_without_this_rank},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

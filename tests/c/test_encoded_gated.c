/* test_encoded_gated.c - all-reduces whose contributions are encoded already, and come bit by bit:
 * other ranks cannot tell, what is final is taken once, and residuals are those of a whole tensor.
 */
#include "packer.h"
#include "quant_world.h"

enum { STRETCHES = 512, LEAST = 2000, ENOUGH = 20000 };

/* Of one rank: what is still to be shown, and what has been taken. */
typedef struct side {
    packer p;
    rc_call call;
    rc_work *work;
    uint8_t *values; /* what the call's memory is to have */
    uint8_t *taken;  /* what it had when that was final */
    uint64_t taken_elems;
    order_stretch left[STRETCHES];
    int count;
} side;

typedef struct place {
    uint64_t at, bytes;
} place;

/* A segment's place in the memory of the call: at first, and at the end, where of two ranks each
 * has one. */
static place source_of(const side *s, uint64_t part, uint64_t segment, uint64_t elems)
{
    const rc_layout *l = &s->p.layout;
    if ((int64_t)part == l->own)
        return (place){l->plain + segment * l->segment_elems * 4, elems * 4};
    return (place){(uint64_t)(packer_own(&s->p, part, segment) - s->p.memory),
                   quant_bytes(&s->p.codec, elems)};
}

static place result_of(const side *s, uint64_t place_of, uint64_t segment, uint64_t elems)
{
    return (place){(uint64_t)(packer_payload(&s->p, place_of, segment) - s->p.memory),
                   quant_bytes(&s->p.codec, elems)};
}

/* Copies what lies of a stretch of whole segments. */
static void copy_stretch(const side *s, order_stretch one, uint8_t *to, const uint8_t *from,
                         int is_source)
{
    uint64_t start, n;
    for (uint64_t at = one.start; at < one.start + one.elems; at += n) {
        uint64_t part = at / s->p.layout.part_elems;
        uint64_t segment = at % s->p.layout.part_elems / s->p.layout.segment_elems;
        n = packer_segment(&s->p, part, segment, &start);
        CHECK_EQ(start, at);
        for (uint64_t term = 0; term < (is_source ? 1 : s->p.layout.terms); term++) {
            place where =
                is_source ? source_of(s, part, segment, n) : result_of(s, part + term, segment, n);
            memcpy(to + where.at, from + where.at, where.bytes);
        }
    }
}

/* Cuts each part into stretches of a few segments. */
static void cut(side *s)
{
    uint64_t start, n;
    for (uint64_t part = 0; part < s->p.layout.parts; part++)
        for (uint64_t k = 0; packer_segment(&s->p, part, k, &start) > 0;) {
            order_stretch one = {start, 0};
            uint64_t end = k + 1 + draw_below(&seed, 3), ignored;
            for (; k < end && (n = packer_segment(&s->p, part, k, &ignored)) > 0; k++)
                one.elems += n;
            CHECK(s->count < STRETCHES);
            s->left[s->count++] = one;
        }
}

static void begin(side *s, rc_comm *comm, const rc_call *call)
{
    *s = (side){.p = packer_open(comm, call)};
    uint64_t bytes = s->p.layout.bytes;
    s->call = packer_pack(&s->p);
    s->values = memcpy(malloc(bytes + 1), s->p.memory, bytes);
    s->taken = malloc(bytes + 1);
    memset(s->p.memory, 0xff, bytes);
    cut(s);
    gate *g = gate_create((uint32_t)s->count, LEAST, ENOUGH);
    if (s->call.feedback != NULL)
        CHECK(feedback_take_ready(s->call.feedback));
    CHECK_EQ(comm_submit(comm, &s->call, g, &s->work), RC_OK);
}

static void show_one(side *s)
{
    rc_comm *comm = s->p.comm;
    int which = (int)draw_below(&seed, (uint64_t)s->count);
    order_stretch one = s->left[which];
    s->left[which] = s->left[--s->count];
    copy_stretch(s, one, s->p.memory, s->values, 1);
    engine_lock(comm->engine);
    comm_show(comm, s->work, one);
    engine_unlock(comm->engine);
}

static void take_final(side *s)
{
    order_stretch one;
    engine_lock(s->p.comm->engine);
    while (gate_take(s->work->gate, &one)) {
        copy_stretch(s, one, s->taken, s->p.memory, 0);
        s->taken_elems += one.elems;
    }
    engine_unlock(s->p.comm->engine);
}

/* What was taken has not changed since, and is all there is. */
static void end(side *s)
{
    rc_error error;
    if (!CHECK_EQ(outcome(s->work, &error), RC_OK))
        CHECK_NOTE("%s\n", error.message);
    take_final(s);
    CHECK_EQ(s->taken_elems, s->p.call.count);
    memcpy(s->values, s->p.memory, s->p.layout.bytes);
    copy_stretch(s, (order_stretch){0, s->p.call.count}, s->values, s->taken, 0);
    CHECK(memcmp(s->values, s->p.memory, s->p.layout.bytes) == 0);
    packer_unpack(&s->p, s->work);
}

static void free_side(side *s)
{
    packer_close(&s->p);
    rc_work_free(s->work);
    free(s->values);
    free(s->taken);
}

/* An all-reduce in which the ranks of a set pack bit by bit, and others have tensors as they are.
 * late: a rank that brings nothing before the others have brought all, or -1. */
static void run_mixed(world *w, tensors *t, rc_feedback **feedback, rc_codec codec, rc_op op,
                      unsigned gated, int late)
{
    static side sides[WORLD_MAX];
    rc_work *works[WORLD_MAX];
    int left = 0;
    for (int rank = 0; rank < w->size; rank++) {
        rc_call call = call_of(t, rank, codec, op, rank % 2);
        call.feedback = feedback != NULL ? feedback[rank] : NULL;
        if (gated >> rank & 1) {
            begin(&sides[rank], w->comms[rank], &call);
            left += sides[rank].count;
        } else {
            works[rank] = submit(w->comms[rank], &call);
        }
    }
    for (; left > 0; left--) {
        int rank = (int)draw_below(&seed, (uint64_t)w->size);
        int is_late = late >= 0 && (gated >> late & 1) && left > sides[late].count;
        while (!(gated >> rank & 1) || sides[rank].count == 0 || (is_late && rank == late))
            rank = (rank + 1) % w->size;
        show_one(&sides[rank]);
        if (left % 8 == 0)
            usleep(100);
        take_final(&sides[rank]);
    }
    for (int rank = 0; rank < w->size; rank++) {
        if (gated >> rank & 1) {
            end(&sides[rank]);
            free_side(&sides[rank]);
        } else {
            expect_done(works[rank]);
        }
    }
}

/* By turns all ranks pack, or some of them, and one comes late. */
static void by_turns(world *w, tensors *t, rc_feedback **feedback, rc_codec codec, rc_op op,
                     unsigned step)
{
    unsigned size = (unsigned)w->size, all = (1U << size) - 1;
    run_mixed(w, t, feedback, codec, op, step % 2 ? all : 0x6db6U >> (step + size) & all,
              step < 2 ? -1 : (int)(step % size));
}

static void one_world(int size, uint64_t count, rc_codec codec, rc_op op)
{
    const world_options options = {
        .size = size, .segment_bytes = 4096, .engines = size % 2, .lanes = 2};
    hold_to_formulas_in(options, count, codec, op, by_turns, 4);
}

static void sources_that_come_bit_by_bit(void)
{
    for (int size = 2; size <= 5; size++)
        for (size_t c = 0; c < CHECK_COUNT(codecs); c++) {
            const uint64_t counts[] = {1, 257, 3000, 30001};
            for (size_t k = 0; k < CHECK_COUNT(counts); k++)
                if (k < 3 || codecs[c] != RC_CODEC_FP8) /* slow in the reference */
                    one_world(size, counts[k], codecs[c], (c + k) % 2 ? RC_AVG : RC_SUM);
        }
}

static void most_pack(world *w, tensors *t, rc_feedback **feedback, rc_codec codec, rc_op op,
                      unsigned late)
{
    run_mixed(w, t, feedback, codec, op, 7, (int)late);
}

static void what_is_not_finite_is_found_by_all(void)
{
    for (int size = 2; size <= 4; size++)
        for (int guilty = 0; guilty < size; guilty++)
            expect_nan(size, guilty, 30000, most_pack, (unsigned)guilty);
}

/* A result cannot come without this rank's part of it. */
static void joins_wait_for_this_rank(void)
{
    enum { COUNT = 30000 };
    for (int size = 2; size <= 3; size++) {
        static side late;
        rc_work *works[WORLD_MAX];
        world *w = world_open((world_options){.size = size, .segment_bytes = 4096});
        tensors t = make_tensors(size, COUNT);
        draw_values(&t);
        for (int rank = 1; rank < size; rank++) {
            rc_call call = call_of(&t, rank, RC_CODEC_INT8, RC_SUM, 1);
            works[rank] = submit(w->comms[rank], &call);
        }
        rc_call call = call_of(&t, 0, RC_CODEC_INT8, RC_SUM, 1);
        begin(&late, w->comms[0], &call);
        usleep(5000);
        take_final(&late);
        CHECK_EQ(late.taken_elems, 0);
        while (late.count > 0)
            show_one(&late);
        end(&late);
        for (int rank = 1; rank < size; rank++) {
            expect_done(works[rank]);
            CHECK(memcmp(t.dst[rank], t.dst[0], COUNT * sizeof(float)) == 0);
        }
        free_side(&late);
        free_tensors(&t);
        world_close(w);
    }
}

/* Who still packs holds the feedback when the work has failed; residuals stay as they were. */
static void a_failure_behind_a_gate(void)
{
    enum { COUNT = 30000 };
    for (int size = 2; size <= 3; size++)
        for (int shown = 0; shown < 20; shown += 3) {
            static side sides[3];
            rc_feedback *feedback[WORLD_MAX];
            rc_error error;
            world *w = world_open((world_options){.size = size, .segment_bytes = 4096});
            tensors t = make_tensors(size, COUNT);
            open_feedback(feedback, size, COUNT);
            draw_values(&t);
            run_step(w, &t, feedback, RC_CODEC_ONEBIT, RC_SUM, 1);
            float before = rc_feedback_worker(feedback[0])[COUNT - 1];
            for (int rank = 0; rank < size; rank++) {
                rc_call call = call_of(&t, rank, RC_CODEC_INT4, RC_SUM, 1);
                call.feedback = feedback[rank];
                begin(&sides[rank], w->comms[rank], &call);
            }
            feedback_hold(feedback[0]);
            for (int i = 0; i < shown && sides[0].count > 0; i++)
                for (int rank = 0; rank < size; rank++)
                    if (sides[rank].count > 1)
                        show_one(&sides[rank]);
            usleep(1000);
            rc_comm_abort(w->comms[1], "enough");
            for (int rank = 0; rank < size; rank++)
                CHECK_EQ(outcome(sides[rank].work, &error), RC_ABORTED);
            CHECK(rc_feedback_busy(feedback[0]));
            CHECK(!rc_feedback_busy(feedback[1]));
            feedback_unclaim(feedback[0]);
            CHECK(!rc_feedback_busy(feedback[0]));
            CHECK(rc_feedback_worker(feedback[0])[COUNT - 1] == before);
            for (int rank = 0; rank < size; rank++)
                free_side(&sides[rank]);
            close_feedback(feedback, size);
            free_tensors(&t);
            world_close(w);
        }
}

int main(void)
{
    static const check_test tests[] = {
        {"sources_that_come_bit_by_bit", sources_that_come_bit_by_bit},
        {"what_is_not_finite_is_found_by_all", what_is_not_finite_is_found_by_all},
        {"joins_wait_for_this_rank", joins_wait_for_this_rank},
        {"a_failure_behind_a_gate", a_failure_behind_a_gate},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

/* test_blocks.c - flights whose codec is one of blocks: what the GPU packs is what the formulas
 * say, with residuals on the GPU, over several steps; faults are seen, and failures leave nothing
 * behind.
 */
#include "block_flights.h"

enum { COUNT = 4500 };

/* ---- bits ---- */

static void one_world(int size, uint64_t count, rc_codec codec, rc_op op)
{
    flights *all = flights_open(size, "", ptx(), 1 << 20);
    for (int with = 0; with <= 1; with++) {
        formulas f = formulas_open(size, count, with);
        for (int i = 0; i < 4; i++) {
            formulas_draw(&f, codec, op);
            if (!step(all, &f.t, f.feedback, codec, op, f.want))
                CHECK_NOTE("codec %d op %d world %d step %d\n", codec, op, size, i);
            if (with) /* looked at before */
                CHECK((f.feedback[0]->twin != NULL) == (i != 2 || size == 2));
            if (with && i == 1)
                check_residuals(f.feedback, &f.ref);
        }
        if (with)
            check_residuals(f.feedback, &f.ref);
        formulas_close(&f);
    }
    flights_close(all);
    gpu_expect_clean();
}

static void flights_give_what_the_formulas_say(void)
{
    for (int size = 2; size <= 4; size++)
        for (size_t c = 0; c < CHECK_COUNT(codecs); c++)
            one_world(size, c % 2 ? COUNT : 700, codecs[c], c / 2 ? RC_AVG : RC_SUM);
}

/* ---- faults and failures ---- */

static void faults_are_seen(void)
{
    for (int size = 2; size <= 3; size++)
        expect_faults_seen(size, call_at(0, FLIGHTS_COUNT, RC_CODEC_INT8, RC_SUM));
}

static void failures_leave_nothing_behind(void)
{
    for (int size = 2; size <= 3; size++)
        expect_clean_failures(size, call_at(0, COUNT, RC_CODEC_INT4, RC_AVG));
}

static void which_flights_it_takes(void)
{
    flights *all = flights_open(2, "", ptx(), 1 << 20);
    rc_pipe *pipe = all->pipes[0];
    rc_piece piece = {0};
    const rc_flight good = {.pipe = pipe, .call = call_at(4096, COUNT, RC_CODEC_FP8, RC_SUM)};
    rc_flight flight = good;
    CHECK(blocks_suits(&flight));
    flight.call.codec = RC_CODEC_BF16;
    CHECK(!blocks_suits(&flight));
    flight = good, flight.call.src = (const void *)4098;
    CHECK(!blocks_suits(&flight));
    flight = good, flight.pieces = &piece, flight.piece_count = 1;
    CHECK(blocks_suits(&flight));
    piece.bytes = 6;
    CHECK(!blocks_suits(&flight));
    flight = good, flight.call.dtype = RC_F64;
    CHECK(!blocks_suits(&flight));
    flight = good, flight.call.collective = RC_REDUCE_SCATTER;
    CHECK(!blocks_suits(&flight));
    flights_close(all);
    gpu_expect_clean();
}

int main(void)
{
    const check_test tests[] = {
        {"which flights it takes", which_flights_it_takes},
        {"flights give what the formulas say", flights_give_what_the_formulas_say},
        {"faults are seen", faults_are_seen},
        {"failures leave nothing behind", failures_leave_nothing_behind},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

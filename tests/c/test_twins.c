/* test_twins.c - residuals in a GPU's memory: they go from pipe to pipe, come home with the end of
 * one, and their memory goes back with them.
 */
#include "block_flights.h"

enum { COUNT = 4500 };

static void residuals_move_from_pipe_to_pipe(void)
{
    rc_feedback *feedback[2];
    tensors t = make_tensors(2, COUNT);
    qref_world ref = qref_open(2, COUNT, 1);
    float *want = calloc(COUNT, sizeof *want);
    flights *all = flights_open(2, "", ptx(), 1 << 20), others = *all;
    world *second = world_open((world_options){.size = 2});
    rc_error error;
    others.world = second;
    for (int rank = 0; rank < 2; rank++)
        CHECK_EQ(rc_pipe_create(&others.pipes[rank], second->comms[rank], gpu_path(), 0, ptx(),
                                1 << 20, &error),
                 RC_OK);
    open_feedback(feedback, 2, COUNT);
    for (int i = 0; i < 6; i++) {
        draw_values(&t);
        qref_allreduce(&ref, RC_CODEC_INT4, RC_SUM, t.src, want);
        step(i / 2 % 2 ? &others : all, &t, feedback, RC_CODEC_INT4, RC_SUM, want);
        CHECK(feedback[0]->twin != NULL);
    }
    for (int rank = 0; rank < 2; rank++) {
        rc_comm_close(second->comms[rank], 0);
        rc_pipe_stop(others.pipes[rank]);
        rc_pipe_free(others.pipes[rank]);
    }
    world_close(second);
    CHECK(feedback[0]->twin != NULL); /* the first's */
    rc_comm_close(all->world->comms[0], 0);
    rc_pipe_stop(all->pipes[0]);
    CHECK(feedback[0]->twin == NULL);
    check_residuals(feedback, &ref);
    rc_pipe_free(all->pipes[0]);
    rc_comm_close(all->world->comms[1], 0);
    rc_pipe_stop(all->pipes[1]);
    rc_pipe_free(all->pipes[1]);
    world_close(all->world);
    cuCtxSetCurrent(NULL);
    cuDevicePrimaryCtxRelease_v2(0);
    free(all);
    close_feedback(feedback, 2);
    qref_close(&ref);
    free(want);
    free_tensors(&t);
    gpu_expect_clean();
}

/* However many calls have used it. */
static void memory_goes_back_with_the_feedback(void)
{
    rc_feedback *feedback[2];
    tensors t = make_tensors(2, COUNT);
    qref_world ref = qref_open(2, COUNT, 1);
    float *want = calloc(COUNT, sizeof *want);
    flights *all = flights_open(2, "", ptx(), 1 << 20);
    for (int life = 0; life < 3; life++) {
        open_feedback(feedback, 2, COUNT);
        qref_close(&ref);
        ref = qref_open(2, COUNT, 1);
        for (int i = 0; i <= life; i++) {
            draw_values(&t);
            qref_allreduce(&ref, RC_CODEC_INT8, RC_SUM, t.src, want);
            CHECK(step(all, &t, feedback, RC_CODEC_INT8, RC_SUM, want));
        }
        CHECK(feedback[0]->twin != NULL && all->pipes[0]->twins != NULL);
        close_feedback(feedback, 2);
        CHECK(all->pipes[0]->twins == NULL && all->pipes[1]->twins == NULL);
    }
    flights_close(all);
    qref_close(&ref);
    free(want);
    free_tensors(&t);
    gpu_expect_clean();
}

int main(void)
{
    const check_test tests[] = {
        {"residuals move from pipe to pipe", residuals_move_from_pipe_to_pipe},
        {"memory goes back with the feedback", memory_goes_back_with_the_feedback},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

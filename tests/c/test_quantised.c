/* test_quantised.c - all-reduces, reduce-scatters and all-gathers by codecs of few bits: bit for
 * bit what the formulas give, nothing lost over many steps, and residuals that change only when
 * they may.
 */
#include "quant_world.h"

static void in_place_or_not(world *w, tensors *t, rc_feedback **feedback, rc_codec codec, rc_op op,
                            unsigned step)
{
    run_step(w, t, feedback, codec, op, step % 2);
}

static void all_reduce_is_what_the_formulas_give(void)
{
    static const int sizes[] = {2, 3, 5, 8};
    for (size_t s = 0; s < CHECK_COUNT(sizes); s++)
        for (size_t c = 0; c < CHECK_COUNT(codecs); c++) {
            int n = sizes[s];
            const uint64_t counts[] = {0, 1, (uint64_t)n - 1, 255, 256, 257, 3000, 30003};
            size_t large = c == s % CHECK_COUNT(codecs); /* one codec in each world */
            for (size_t k = 0; k < CHECK_COUNT(counts) - 1 + large; k++)
                hold_to_formulas(n, counts[k], codecs[c], (s + c + k) % 2 ? RC_AVG : RC_SUM,
                                 in_place_or_not);
        }
}

/* ---- f64 ---- */

/* Rounded to f32 first, all the rest as ever. */
static void f64_is_rounded_first(void)
{
    enum { N = 3, COUNT = 5000 };
    static double src[N][COUNT], dst[N][COUNT];
    static float want[COUNT];
    for (size_t c = 0; c < CHECK_COUNT(codecs); c++)
        for (int size = 2; size <= N; size++) {
            world *w = world_open((world_options){.size = size, .segment_bytes = 4096});
            tensors t = make_tensors(size, COUNT);
            qref_world ref = qref_open(size, COUNT, 1);
            rc_feedback *feedback[WORLD_MAX];
            rc_call calls[WORLD_MAX];
            open_feedback(feedback, size, COUNT);
            for (int step = 0; step < 2; step++) {
                for (int rank = 0; rank < size; rank++) {
                    fill_random(src[rank], RC_F64, COUNT, &seed);
                    for (int i = 0; i < COUNT; i++)
                        t.src[rank][i] = (float)src[rank][i];
                    calls[rank] = small_call(RC_ALLREDUCE, dst[rank], COUNT);
                    calls[rank].dtype = RC_F64;
                    calls[rank].codec = codecs[c];
                    calls[rank].src = src[rank];
                    calls[rank].feedback = feedback[rank];
                }
                qref_allreduce(&ref, codecs[c], RC_SUM, t.src, want);
                run_calls(w, calls);
                for (int rank = 0; rank < size; rank++)
                    for (int i = 0; i < COUNT; i++)
                        CHECK(dst[rank][i] == (double)want[i]);
                check_residuals(feedback, &ref);
            }
            close_feedback(feedback, size);
            qref_close(&ref);
            free_tensors(&t);
            world_close(w);
        }
}

/* ---- among hosts ---- */

/* What the ranks of one place have: each host's sum of their chunk. */
static void sum_hosts(const tensors *t, int hosts, uint64_t start, uint64_t count, float *sums[])
{
    int ranks = t->size / hosts;
    for (int host = 0; host < hosts; host++)
        for (uint64_t i = 0; i < count; i++) {
            float sum = t->src[host * ranks][start + i];
            for (int k = 1; k < ranks; k++)
                sum = sum + t->src[host * ranks + k][start + i];
            sums[host][i] = sum;
        }
}

static void one_cluster(int hosts, int ranks, uint64_t count, rc_codec codec, rc_op op)
{
    enum { MOST_RANKS = 4, STEPS = 3 };
    int size = hosts * ranks;
    uint64_t unit = (uint64_t)ranks * 256, chunk = (count + unit - 1) / unit * 256;
    world *w = world_open((world_options){
        .size = size, .hosts = hosts, .memory = 1, .segment_bytes = 4096, .engines = 1});
    rc_feedback *feedback[WORLD_MAX];
    tensors t = make_tensors(size, count), sums = make_tensors(hosts, chunk);
    qref_world ref[MOST_RANKS];
    float *want = calloc(chunk + 1, sizeof *want);
    open_feedback(feedback, size, count);
    for (int place = 0; place < ranks; place++) {
        uint64_t start = chunk * (uint64_t)place < count ? chunk * (uint64_t)place : count;
        ref[place] = qref_open(hosts, count - start < chunk ? count - start : chunk, 1);
        ref[place].contributors = size;
    }
    for (int step = 0; step < STEPS; step++) {
        draw_values(&t);
        run_step(w, &t, feedback, codec, op, step % 2);
        for (int place = 0; place < ranks; place++) {
            uint64_t start = chunk * (uint64_t)place, here = ref[place].count;
            if (here == 0)
                continue;
            sum_hosts(&t, hosts, start, here, sums.src);
            qref_allreduce(&ref[place], codec, op, sums.src, want);
            for (int rank = 0; rank < size; rank++)
                same(t.dst[rank] + start, want, here, "result among hosts", rank);
            for (int host = 0; host < hosts; host++)
                same(rc_feedback_worker(feedback[host * ranks + place]) + start,
                     ref[place].worker[host], here, "worker among hosts", host * ranks + place);
        }
    }
    for (int place = 0; place < ranks; place++)
        qref_close(&ref[place]);
    close_feedback(feedback, size);
    free(want);
    free_tensors(&sums);
    free_tensors(&t);
    world_close(w);
}

static void hosts_quantise_what_their_ranks_have_added(void)
{
    static const uint64_t counts[] = {1, 257, 10007};
    for (size_t c = 0; c < CHECK_COUNT(codecs); c++)
        for (size_t k = 0; k < CHECK_COUNT(counts); k++) {
            one_cluster(2, 2, counts[k], codecs[c], RC_AVG);
            one_cluster(3, 2, counts[k], codecs[c], RC_SUM);
        }
}

/* ---- reduce-scatter and all-gather ---- */

static void one_half(rc_collective collective, int size, uint64_t each, rc_codec codec, rc_op op)
{
    uint64_t whole = each * (uint64_t)size;
    int scatters = collective == RC_REDUCE_SCATTER;
    world *w = world_open((world_options){.size = size, .segment_bytes = 4096});
    tensors t = make_tensors(size, whole), want = make_tensors(size, whole);
    qref_world ref = qref_open(size, scatters ? whole : each, 1);
    rc_feedback *feedback[WORLD_MAX];
    open_feedback(feedback, size, ref.count);
    for (int step = 0; step < 3; step++) {
        rc_call calls[WORLD_MAX];
        draw_values(&t);
        for (int rank = 0; rank < size; rank++) {
            calls[rank] = small_call(collective, t.dst[rank], each);
            calls[rank].src = t.src[rank];
            calls[rank].codec = codec;
            calls[rank].op = op;
            calls[rank].feedback = feedback[rank];
        }
        if (scatters)
            qref_reduce_scatter(&ref, codec, op, t.src, want.dst);
        else
            qref_allgather(&ref, codec, t.src, want.dst[0]);
        run_calls(w, calls);
        for (int rank = 0; rank < size; rank++) {
            same(t.dst[rank], want.dst[scatters ? rank : 0], scatters ? each : whole, "half", rank);
            same(rc_feedback_worker(feedback[rank]), ref.worker[rank], ref.count, "worker", rank);
        }
    }
    close_feedback(feedback, size);
    qref_close(&ref);
    free_tensors(&t);
    free_tensors(&want);
    world_close(w);
}

static void halves_are_what_the_formulas_give(void)
{
    static const uint64_t counts[] = {0, 1, 257, 10007};
    static const int sizes[] = {2, 3, 5};
    for (size_t s = 0; s < CHECK_COUNT(sizes); s++)
        for (size_t c = 0; c < CHECK_COUNT(codecs); c++)
            for (size_t k = 0; k < CHECK_COUNT(counts); k++) {
                one_half(RC_REDUCE_SCATTER, sizes[s], counts[k], codecs[c],
                         c % 2 ? RC_AVG : RC_SUM);
                one_half(RC_ALLGATHER, sizes[s], counts[k], codecs[c], RC_SUM);
            }
}

int main(void)
{
    static const check_test tests[] = {
        {"all_reduce_is_what_the_formulas_give", all_reduce_is_what_the_formulas_give},
        {"f64_is_rounded_first", f64_is_rounded_first},
        {"hosts_quantise_what_their_ranks_have_added", hosts_quantise_what_their_ranks_have_added},
        {"halves_are_what_the_formulas_give", halves_are_what_the_formulas_give},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

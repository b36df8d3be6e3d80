/* test_quantised.c - all-reduces, reduce-scatters and all-gathers by codecs of few bits: to the bit
 * the same whatever the segments, lanes and kernels, exact where nothing has to be rounded, and
 * residuals that are the same, too. tests/test_quantised.py holds them to the formulas.
 */
#include "quant_world.h"

static void in_place_or_not(world *w, tensors *t, rc_feedback **feedback, rc_codec codec, rc_op op,
                            unsigned step)
{
    run_step(w, t, feedback, codec, op, step % 2);
}

static void all_reduce_is_the_same_in_other_worlds(void)
{
    static const int sizes[] = {2, 3, 5, 8};
    for (size_t s = 0; s < CHECK_COUNT(sizes); s++) {
        int n = sizes[s];
        const uint64_t counts[] = {0, 1, (uint64_t)n - 1, 255, 256, 257, 3000, 30003};
        world *w = world_open((world_options){.size = n, .segment_bytes = 4096});
        world *other = other_world(n);
        for (size_t c = 0; c < CHECK_COUNT(codecs); c++)
            for (size_t k = 0; k < CHECK_COUNT(counts); k++)
                for (int with = 0; with <= 1; with++)
                    hold_steps(w, other, counts[k], codecs[c], (s + c + k) % 2 ? RC_AVG : RC_SUM,
                               in_place_or_not, 3, with);
        world_close(other);
        world_close(w);
    }
}

/* ---- by construction ---- */

/* Fills all ranks' sources with whole numbers that the codec keeps as they are, times 2 to the
 * power of the rank, so that it keeps their sum, too, and another's values or one's own twice show.
 * Returns those of rank 0. Blocks begin with each part of the tensor. */
static const float *draw_whole(tensors *t, rc_codec codec, uint64_t part)
{
    const uint64_t limit = codec == RC_CODEC_INT8     ? 127
                           : codec == RC_CODEC_INT4   ? 7
                           : codec == RC_CODEC_ONEBIT ? 1
                                                      : 448;
    uint64_t salt = draw(&seed);
    for (uint64_t i = 0; i < t->count; i++) {
        uint64_t most = limit == 448 ? 15 : limit; /* e4m3 has four binary digits */
        int is_first = i % part % 64 == 0 || codec == RC_CODEC_ONEBIT;
        float size = (float)(is_first ? limit : draw_below(&seed, most + 1));
        float value = draw_below(&seed, 2) ? size : 0.0F - size;
        if (codec == RC_CODEC_INT2)
            value = (float)draw_rotated(salt + i / part, i % part, part);
        for (int rank = 0; rank < t->size; rank++)
            t->src[rank][i] = value * (float)(1 << rank);
    }
    return t->src[0];
}

static void expect_times(const float *got, const float *values, float factor, uint64_t count,
                         int rank)
{
    uint64_t i = 0;
    while (i < count && got[i] == values[i] * factor)
        i++;
    if (!CHECK(i == count))
        CHECK_NOTE("rank %d, element %llu: got %a instead of %a times %g\n", rank,
                   (unsigned long long)i, (double)got[i], (double)values[i], (double)factor);
}

static void expect_nothing_left(rc_feedback **feedback, int size)
{
    for (int rank = 0; rank < size; rank++) {
        uint64_t start, count;
        const float *owner = rc_feedback_owner(feedback[rank], &start, &count);
        const float *worker = rc_feedback_worker(feedback[rank]);
        for (uint64_t i = 0; i < rc_feedback_count(feedback[rank]); i++)
            CHECK(worker[i] == 0.0F);
        for (uint64_t i = 0; i < count; i++)
            CHECK(owner[i] == 0.0F);
    }
}

static void one_exact_sum(world *w, uint64_t count, rc_codec codec)
{
    tensors t = make_tensors(w->size, count);
    rc_feedback *feedback[WORLD_MAX];
    float sum = (float)((1 << w->size) - 1); /* of the powers */
    open_feedback(feedback, w->size, count);
    for (int step = 0; step < 4; step++) {
        int averages = step > 1 && (w->size & (w->size - 1)) == 0; /* else 1 / size is rounded */
        const float *values = draw_whole(&t, codec, count);
        run_step(w, &t, feedback, codec, averages ? RC_AVG : RC_SUM, 0);
        for (int rank = 0; rank < w->size; rank++)
            expect_times(t.dst[rank], values, averages ? sum / (float)w->size : sum, count, rank);
        expect_nothing_left(feedback, w->size);
        for (int rank = 0; step == 1 && rank < w->size;
             rank++) /* averages have a unit of their own */
            CHECK_EQ(rc_feedback_load(feedback[rank], NULL, NULL, 0, 0), RC_OK);
    }
    close_feedback(feedback, w->size);
    free_tensors(&t);
}

static void a_sum_that_codecs_keep_is_exact(void)
{
    static const uint64_t counts[] = {1, 255, 257, 3000, 30003};
    for (int size = 2; size <= 8; size++) {
        world *w = world_open((world_options){.size = size, .segment_bytes = 4096});
        for (size_t c = 0; c < CHECK_COUNT(codecs); c++)
            for (size_t k = 0; k < CHECK_COUNT(counts); k++)
                one_exact_sum(w, counts[k], codecs[c]);
        world_close(w);
    }
}

/* ---- f64 ---- */

/* Rounded to f32 first, all the rest as that. */
static void f64_is_rounded_first(void)
{
    enum { N = 3, COUNT = 5000 };
    static double src[N][COUNT], dst[N][COUNT];
    for (size_t c = 0; c < CHECK_COUNT(codecs); c++)
        for (int size = 2; size <= N; size++) {
            world *w = world_open((world_options){.size = size, .segment_bytes = 4096});
            twins both = twins_open(size, COUNT, 1);
            rc_call calls[WORLD_MAX];
            for (int step = 0; step < 2; step++) {
                for (int rank = 0; rank < size; rank++) {
                    fill_random(src[rank], RC_F64, COUNT, &seed);
                    for (int i = 0; i < COUNT; i++)
                        both.t.src[rank][i] = (float)src[rank][i];
                    calls[rank] = small_call(RC_ALLREDUCE, dst[rank], COUNT);
                    calls[rank].dtype = RC_F64;
                    calls[rank].codec = codecs[c];
                    calls[rank].src = src[rank];
                    calls[rank].feedback = both.other_feedback[rank];
                }
                run_calls(w, calls);
                run_step(w, &both.t, both.feedback, codecs[c], RC_SUM, 0);
                for (int rank = 0; rank < size; rank++)
                    for (int i = 0; i < COUNT; i++)
                        CHECK(dst[rank][i] == (double)both.t.dst[rank][i]);
                same_residuals(both.feedback, both.other_feedback, size);
            }
            twins_close(&both);
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

/* Each place's chunk has the bits that a world of as many ranks as hosts would have of their sums;
 * with two of them an average is half of it, as twice as many ranks are in it. */
static void one_cluster(int hosts, int ranks, uint64_t count, rc_codec codec, rc_op op)
{
    enum { MOST_RANKS = 4, STEPS = 3 };
    int size = hosts * ranks;
    uint64_t unit = (uint64_t)ranks * 256, chunk = (count + unit - 1) / unit * 256;
    world *w = world_open((world_options){
        .size = size, .hosts = hosts, .memory = 1, .segment_bytes = 4096, .engines = 1});
    world *flat = other_world(hosts);
    rc_feedback *feedback[WORLD_MAX];
    tensors t = make_tensors(size, count);
    twins sums[MOST_RANKS];
    float share = op == RC_AVG ? (float)hosts / (float)size : 1.0F;
    open_feedback(feedback, size, count);
    for (int place = 0; place < ranks; place++) {
        uint64_t start = chunk * (uint64_t)place < count ? chunk * (uint64_t)place : count;
        sums[place] = twins_open(hosts, count - start < chunk ? count - start : chunk, 1);
    }
    for (int step = 0; step < STEPS; step++) {
        draw_values(&t);
        run_step(w, &t, feedback, codec, op, step % 2);
        for (int place = 0; place < ranks; place++) {
            uint64_t start = chunk * (uint64_t)place, here = sums[place].t.count;
            if (here == 0)
                continue;
            sum_hosts(&t, hosts, start, here, sums[place].t.src);
            run_step(flat, &sums[place].t, sums[place].feedback, codec, op, 0);
            for (int rank = 0; rank < size; rank++)
                for (uint64_t i = 0; i < here; i++)
                    CHECK(t.dst[rank][start + i] == sums[place].t.dst[0][i] * share);
            for (int host = 0; host < hosts; host++)
                same(rc_feedback_worker(feedback[host * ranks + place]) + start,
                     rc_feedback_worker(sums[place].feedback[host]), here, "worker among hosts",
                     host * ranks + place);
        }
    }
    for (int place = 0; place < ranks; place++)
        twins_close(&sums[place]);
    close_feedback(feedback, size);
    free_tensors(&t);
    world_close(flat);
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

static void run_half(world *w, tensors *t, rc_feedback **feedback, const rc_call *how)
{
    rc_call calls[WORLD_MAX];
    for (int rank = 0; rank < w->size; rank++) {
        calls[rank] = small_call(how->collective, t->dst[rank], how->count);
        calls[rank].src = t->src[rank];
        calls[rank].codec = how->codec;
        calls[rank].op = how->op;
        calls[rank].feedback = feedback[rank];
    }
    run_calls(w, calls);
}

/* Sums, or everyone's values, that the codec keeps. */
static void one_exact_half(world *w, const rc_call *how)
{
    uint64_t each = how->count, whole = each * (uint64_t)w->size;
    tensors t = make_tensors(w->size, whole);
    rc_feedback *feedback[WORLD_MAX];
    int scatters = how->collective == RC_REDUCE_SCATTER;
    const float *values = draw_whole(&t, how->codec, each + !each);
    open_feedback(feedback, w->size, scatters ? whole : each);
    run_half(w, &t, feedback, how);
    for (int rank = 0; rank < w->size && scatters; rank++)
        expect_times(t.dst[rank], values + each * (uint64_t)rank,
                     (float)((1 << w->size) - 1) / (how->op == RC_AVG ? (float)w->size : 1.0F),
                     each, rank);
    for (int rank = 0; rank < w->size && !scatters; rank++)
        for (int from = 0; from < w->size; from++)
            expect_times(t.dst[rank] + each * (uint64_t)from, values, (float)(1 << from), each,
                         rank);
    expect_nothing_left(feedback, w->size);
    close_feedback(feedback, w->size);
    free_tensors(&t);
}

/* Ordinary values, in two worlds. */
static void one_half(world *w, world *other, const rc_call *how)
{
    int scatters = how->collective == RC_REDUCE_SCATTER;
    uint64_t whole = how->count * (uint64_t)w->size;
    tensors t = make_tensors(w->size, whole), there = make_tensors(w->size, whole);
    rc_feedback *feedback[WORLD_MAX], *other_feedback[WORLD_MAX];
    open_feedback(feedback, w->size, scatters ? whole : how->count);
    open_feedback(other_feedback, w->size, scatters ? whole : how->count);
    for (int step = 0; step < 3; step++) {
        draw_values(&t);
        for (int rank = 0; rank < w->size && whole > 0; rank++)
            memcpy(there.src[rank], t.src[rank], whole * sizeof(float));
        run_half(w, &t, feedback, how);
        run_half(other, &there, other_feedback, how);
        for (int rank = 0; rank < w->size; rank++)
            same(t.dst[rank], there.dst[scatters ? rank : 0], scatters ? how->count : whole, "half",
                 rank);
        same_residuals(feedback, other_feedback, w->size);
    }
    close_feedback(feedback, w->size);
    close_feedback(other_feedback, w->size);
    free_tensors(&t);
    free_tensors(&there);
}

static void halves_are_exact_and_the_same_in_other_worlds(void)
{
    static const uint64_t counts[] = {0, 1, 257, 10007};
    static const int sizes[] = {2, 3, 5};
    for (size_t s = 0; s < CHECK_COUNT(sizes); s++) {
        world *w = world_open((world_options){.size = sizes[s], .segment_bytes = 4096});
        world *other = other_world(sizes[s]);
        for (size_t c = 0; c < CHECK_COUNT(codecs) * CHECK_COUNT(counts); c++) {
            rc_call scatter = {.collective = RC_REDUCE_SCATTER,
                               .codec = codecs[c / CHECK_COUNT(counts)],
                               .op = c / CHECK_COUNT(counts) % 2 ? RC_AVG : RC_SUM,
                               .count = counts[c % CHECK_COUNT(counts)]};
            rc_call gather = scatter;
            gather.collective = RC_ALLGATHER;
            gather.op = RC_SUM;
            one_half(w, other, &scatter);
            one_half(w, other, &gather);
            if (sizes[s] == 2 || scatter.op == RC_SUM) /* else 1 / size is rounded */
                one_exact_half(w, &scatter);
            one_exact_half(w, &gather);
        }
        world_close(other);
        world_close(w);
    }
}

int main(void)
{
    static const check_test tests[] = {
        {"all_reduce_is_the_same_in_other_worlds", all_reduce_is_the_same_in_other_worlds},
        {"a_sum_that_codecs_keep_is_exact", a_sum_that_codecs_keep_is_exact},
        {"f64_is_rounded_first", f64_is_rounded_first},
        {"hosts_quantise_what_their_ranks_have_added", hosts_quantise_what_their_ranks_have_added},
        {"halves_are_exact_and_the_same_in_other_worlds",
         halves_are_exact_and_the_same_in_other_worlds},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

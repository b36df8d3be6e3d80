/* test_encoded.c - all-reduces whose contributions are encoded already: ranks that give such, and
 * ranks that do not, have the results of ranks that all give tensors.
 */
#include "packer.h"
#include "quant_world.h"

/* An all-reduce in which the ranks of a set pack by themselves. */
static void run_mixed(world *w, tensors *t, rc_codec codec, rc_op op, unsigned packing)
{
    packer packers[WORLD_MAX];
    rc_work *works[WORLD_MAX];
    for (int rank = 0; rank < w->size; rank++) {
        rc_call call = call_of(t, rank, codec, op, rank % 2);
        if (packing >> rank & 1) {
            packers[rank] = packer_open(w->comms[rank], &call);
            call = packer_pack(&packers[rank]);
        }
        works[rank] = submit(w->comms[rank], &call);
    }
    for (int rank = 0; rank < w->size; rank++) {
        rc_error error;
        if (works[rank] != NULL && !CHECK_EQ(outcome(works[rank], &error), RC_OK))
            CHECK_NOTE("%s\n", error.message);
        if (works[rank] != NULL && packing >> rank & 1)
            packer_unpack(&packers[rank], works[rank]);
        if (packing >> rank & 1)
            packer_close(&packers[rank]);
        rc_work_free(works[rank]);
    }
}

/* By turns all ranks pack, or some of them. */
static void some_pack(world *w, tensors *t, rc_feedback **feedback, rc_codec codec, rc_op op,
                      unsigned step)
{
    unsigned size = (unsigned)w->size;
    CHECK(feedback == NULL);
    run_mixed(w, t, codec, op, step % 2 ? (1U << size) - 1 : 0x5a5aU >> (step + size));
}

static void it_is_what_tensors_give(void)
{
    static const int sizes[] = {2, 3, 4, 5};
    for (size_t s = 0; s < CHECK_COUNT(sizes); s++)
        for (size_t c = 0; c < CHECK_COUNT(codecs); c++) {
            int n = sizes[s];
            const uint64_t counts[] = {0, (uint64_t)n - 1, 257, 3000, 50003};
            world *w = world_open((world_options){.size = n, .segment_bytes = 4096});
            world *other = other_world(n);
            size_t large = c == s; /* one codec in each world */
            for (size_t k = 0; k < CHECK_COUNT(counts) - 1 + large; k++)
                hold_steps(w, other, counts[k], codecs[c], (s + c + k) % 2 ? RC_AVG : RC_SUM,
                           some_pack, 3, 0);
            world_close(other);
            world_close(w);
        }
}

/* A value of one rank that is not finite makes all NaN. */
static void expect_nan(int size, int guilty, unsigned packing)
{
    enum { COUNT = 5000 };
    static const uint32_t nan = 0x7fc00000;
    world *w = world_open((world_options){.size = size, .segment_bytes = 4096});
    tensors t = make_tensors(size, COUNT);
    draw_values(&t);
    t.src[guilty][(guilty * (COUNT / 2 + 3) + 1) % COUNT] = INFINITY;
    run_mixed(w, &t, RC_CODEC_INT4, RC_AVG, packing);
    for (int rank = 0; rank < size; rank++)
        for (int i = 0; i < COUNT; i++)
            if (!CHECK(memcmp(&t.dst[rank][i], &nan, sizeof nan) == 0))
                break;
    free_tensors(&t);
    world_close(w);
}

static void what_is_not_finite_is_found_by_all(void)
{
    for (int size = 2; size <= 4; size++)
        for (int guilty = 0; guilty < size; guilty++)
            for (unsigned packing = 1; packing < 8; packing += 6) /* one rank, or most */
                expect_nan(size, guilty, packing);
}

/* Two ranks have the largest value, which is finite, also encoded. Is their sum? */
static void one_large_sum(rc_codec codec, float largest, int is_nan, unsigned packing)
{
    enum { COUNT = 5000, AT = 3072 };
    world *w = world_open((world_options){.size = 2, .segment_bytes = 4096});
    tensors t = make_tensors(2, COUNT);
    draw_values(&t);
    t.src[0][AT] = t.src[1][AT] = largest;
    run_mixed(w, &t, codec, RC_AVG, packing);
    for (int rank = 0; rank < 2; rank++) {
        CHECK_EQ(isnan(t.dst[rank][0]), is_nan);
        CHECK_EQ(isnan(t.dst[rank][AT]), is_nan);
    }
    free_tensors(&t);
    world_close(w);
}

/* Also where both are told to add for themselves. Of onebit no such values can be encoded. */
static void a_sum_that_is_too_large_is_found_by_all(void)
{
    static const rc_codec some[] = {RC_CODEC_INT8, RC_CODEC_INT4, RC_CODEC_FP8};
    for (size_t c = 0; c < CHECK_COUNT(some); c++)
        for (unsigned packing = 0; packing < 4; packing++) {
            one_large_sum(some[c], 3.0e38F, 1, packing);
            one_large_sum(some[c], 1.6e38F, 0, packing);
        }
}

static void the_layout_covers_the_tensor(void)
{
    static const uint64_t counts[] = {1, 255, 256, 257, 3000, 100003, 5000000};
    for (int size = 2; size <= 5; size++) {
        world *w = world_open((world_options){.size = size});
        for (size_t c = 0; c < CHECK_COUNT(codecs) * CHECK_COUNT(counts); c++) {
            rc_call call = small_call(RC_ALLREDUCE, NULL, counts[c / CHECK_COUNT(codecs)]);
            call.codec = codecs[c % CHECK_COUNT(codecs)];
            for (int rank = 0; rank < size; rank++) {
                packer p = packer_open(w->comms[rank], &call);
                const rc_layout *l = &p.layout;
                uint64_t elems = 0, start, n, end = 0;
                for (uint64_t part = 0; part < l->parts; part++)
                    for (uint64_t k = 0; (n = packer_segment(&p, part, k, &start)) > 0; k++) {
                        uint64_t at = (uint64_t)(packer_payload(&p, part, k) - p.memory);
                        CHECK_EQ(start, elems);
                        CHECK_EQ(start % 256, 0);
                        CHECK(at >= end);
                        elems += n;
                        end = at + quant_bytes(&p.codec, n);
                    }
                CHECK_EQ(elems, call.count);
                CHECK(end <= l->parts * l->part_bytes);
                CHECK_EQ(l->terms, size == 2 ? 2 : 1);
                CHECK_EQ(l->plain, l->terms * l->parts * l->part_bytes);
                CHECK_EQ(l->own, size == 2 ? -1 : rank);
                CHECK_EQ(l->bytes, l->plain + 4 * l->plain_count);
                CHECK(size > 2 || l->plain_count == 0);
                packer_close(&p);
            }
        }
        world_close(w);
    }
}

static void refuse(rc_comm *comm, rc_call call, const char *why)
{
    rc_error error;
    CHECK_EQ(rc_check(comm, &call, &error), RC_INVALID_ARGUMENT);
    if (!CHECK(strstr(error.message, why) != NULL))
        CHECK_NOTE("got: %s\nwant: %s\n", error.message, why);
}

static void what_does_not_fit_is_refused(void)
{
    static float memory[4096];
    rc_layout layout;
    rc_feedback *feedback;
    world *w = world_open((world_options){.size = 2});
    world *alone = world_open((world_options){.size = 1});
    CHECK_EQ(rc_feedback_create(&feedback, 1000), RC_OK);
    rc_call good = small_call(RC_ALLREDUCE, memory, 1000), call = good;
    good.codec = RC_CODEC_INT8;
    good.encoded = 1;
    CHECK_EQ(rc_check(w->comms[0], &good, NULL), RC_OK);
    CHECK_EQ(rc_comm_layout(w->comms[0], &good, &layout), RC_OK);
    call = good, call.src = memory + 2048;
    refuse(w->comms[0], call, "in one memory");
    refuse(alone->comms[0], good, "in one memory");
    CHECK_EQ(rc_comm_layout(alone->comms[0], &good, &layout), RC_INVALID_ARGUMENT);
    call = good, call.feedback = feedback;
    refuse(w->comms[0], call, "without error feedback");
    CHECK_EQ(rc_comm_layout(w->comms[0], &call, &layout), RC_INVALID_ARGUMENT);
    call.codec = RC_CODEC_BF16;
    refuse(w->comms[0], call, "without error feedback");
    call = good, call.dtype = RC_F64;
    refuse(w->comms[0], call, "encoded already");
    CHECK_EQ(rc_comm_layout(w->comms[0], &call, &layout), RC_INVALID_ARGUMENT);
    call = good, call.collective = RC_REDUCE_SCATTER;
    refuse(w->comms[0], call, "encoded already");
    CHECK_EQ(rc_comm_layout(w->comms[0], &call, &layout), RC_INVALID_ARGUMENT);
    call = good, call.codec = RC_CODEC_NONE;
    refuse(w->comms[0], call, "encoded already");
    rc_feedback_free(feedback);
    world_close(alone);
    world_close(w);
}

int main(void)
{
    static const check_test tests[] = {
        {"it_is_what_tensors_give", it_is_what_tensors_give},
        {"what_is_not_finite_is_found_by_all", what_is_not_finite_is_found_by_all},
        {"a_sum_that_is_too_large_is_found_by_all", a_sum_that_is_too_large_is_found_by_all},
        {"the_layout_covers_the_tensor", the_layout_covers_the_tensor},
        {"what_does_not_fit_is_refused", what_does_not_fit_is_refused},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

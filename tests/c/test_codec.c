/* test_codec.c - encode, reduce, combine and store on every kernel set of this CPU, in place and
 * out of place, by every dtype, op and codec, averages over several world sizes: the bits of the
 * portable set out of place, which tests/test_kernels.py holds to the formulas.
 */
#include "../../csrc/codec/codec.h"
#include "check.h"
#include "draw.h"

enum { MOST = 3000, GUARD = 8, GUARD_BYTE = 0xc3 };

static const size_t sizes[] = {0, 1, 7, 255, 1023, 1024, 1025, MOST}; /* 1024: codec.c's block */
static const int worlds[] = {1, 2, 3, 8, 4096};

typedef struct fixture {
    rc_call call;
    int world_size;
    codec codec, portable;
    size_t n, elem, wire;
    uint8_t src[MOST * 8], first[MOST * 8]; /* two ranks' elements */
    uint8_t got[MOST * 8 + GUARD], want[MOST * 8 + GUARD];
} fixture;

static fixture f;
static uint64_t seed = 88172645463325252u;

static void clear_results(void)
{
    memset(f.got, GUARD_BYTE, sizeof f.got);
    memset(f.want, GUARD_BYTE, sizeof f.want);
}

/* Beyond the end too: want holds the guard there. */
static void check_results(const char *what)
{
    if (!CHECK(memcmp(f.got, f.want, sizeof f.got) == 0))
        fprintf(stderr, "%s: dtype %d op %d codec %d world %d n %zu, kernels %s\n", what,
                f.call.dtype, f.call.op, f.call.codec, f.world_size, f.n, f.codec.kernels->name);
}

static void encode_matches(void)
{
    clear_results();
    codec_encode(&f.codec, f.got, f.src, f.n);
    codec_encode(&f.portable, f.want, f.src, f.n);
    check_results("encode");
    if (codec_sends_plain(&f.codec))
        CHECK(memcmp(f.want, f.src, f.n * f.elem) == 0);
}

static void reduce_matches(int last)
{
    uint8_t wire[MOST * 8];
    clear_results();
    codec_encode(&f.portable, wire, f.first, f.n);
    codec_reduce(&f.portable, f.want, wire, f.src, f.n, last);
    codec_reduce(&f.codec, f.got, wire, f.src, f.n, last);
    check_results(last ? "last reduce" : "reduce");
    memcpy(f.got, wire, f.n * f.wire);
    codec_reduce(&f.codec, f.got, f.got, f.src, f.n, last);
    check_results("reduce in place");
    if (codec_stores_plain(&f.codec)) { /* as the owner does it in an in-place all-reduce */
        memcpy(f.got, f.src, f.n * f.elem);
        codec_reduce(&f.codec, f.got, wire, f.got, f.n, last);
        check_results("reduce onto the source");
    }
}

/* Two sums that travelled; the result in a place of its own, and in that of each operand. */
static void combine_matches(int last)
{
    uint8_t a[MOST * 8], b[MOST * 8];
    clear_results();
    codec_encode(&f.portable, a, f.first, f.n);
    codec_encode(&f.portable, b, f.src, f.n);
    codec_combine(&f.portable, f.want, a, b, f.n, last);
    codec_combine(&f.codec, f.got, a, b, f.n, last);
    check_results(last ? "last combine" : "combine");
    memcpy(f.got, a, f.n * f.wire);
    codec_combine(&f.codec, f.got, f.got, b, f.n, last);
    check_results("combine onto the first");
    memcpy(f.got, b, f.n * f.wire);
    codec_combine(&f.codec, f.got, a, f.got, f.n, last);
    check_results("combine onto the second");
}

/* This rank's own contribution made from its tensor, whose place the result may take. */
static void join_matches(void)
{
    uint8_t a[MOST * 8], b[MOST * 8];
    const void *all[] = {a, b}, *others[] = {a, NULL};
    clear_results();
    codec_encode(&f.portable, a, f.first, f.n);
    codec_encode(&f.portable, b, f.src, f.n);
    codec_join(&f.portable, f.want, 0, all, 2, NULL, f.n);
    codec_join(&f.codec, f.got, 0, others, 2, f.src, f.n);
    check_results("join");
    memcpy(f.got, f.src, f.n * f.elem);
    codec_join(&f.codec, f.got, 0, others, 2, f.got, f.n);
    check_results("join onto the source");
}

static void store_matches(void)
{
    uint8_t wire[MOST * 8];
    clear_results();
    codec_encode(&f.portable, wire, f.src, f.n);
    codec_store(&f.portable, f.want, wire, f.n);
    codec_store(&f.codec, f.got, wire, f.n);
    check_results("store");
}

static void one(const kernel_set *kernels, rc_dtype dtype, rc_op op, rc_codec id)
{
    for (size_t w = 0; w < CHECK_COUNT(worlds); w++)
        for (size_t s = 0; s < CHECK_COUNT(sizes); s++) {
            f.call = (rc_call){.dtype = dtype, .op = op, .codec = id};
            f.world_size = worlds[w];
            codec_init(&f.codec, kernels, &f.call, worlds[w]);
            codec_init(&f.portable, kernels_at(0), &f.call, worlds[w]);
            f.n = sizes[s];
            f.elem = rc_dtype_size(dtype);
            f.wire = id != RC_CODEC_NONE ? 2 : f.elem;
            CHECK_EQ(f.codec.elem_bytes, f.elem);
            CHECK_EQ(f.codec.wire_bytes, f.wire);
            fill_random(f.src, dtype, f.n, &seed);
            fill_random(f.first, dtype, f.n, &seed);
            encode_matches();
            reduce_matches(0);
            reduce_matches(1);
            combine_matches(0);
            combine_matches(1);
            join_matches();
            store_matches();
            if (op != RC_AVG && worlds[w] > 2)
                break; /* only an average looks at the world size */
        }
}

static void each_set(rc_codec id)
{
    for (int k = 0; kernels_at(k) != NULL; k++)
        for (int dtype = 0; dtype < RC_DTYPE_COUNT; dtype++)
            for (int op = 0; op < RC_OP_COUNT; op++)
                if (kernels_at(k)->supported() && codec_supports(id, (rc_dtype)dtype))
                    one(kernels_at(k), (rc_dtype)dtype, (rc_op)op, id);
}

static void none(void)
{
    each_set(RC_CODEC_NONE);
}

static void bf16(void)
{
    each_set(RC_CODEC_BF16);
}

static void fp16(void)
{
    each_set(RC_CODEC_FP16);
}

static void compression_takes_wide_floats_only(void)
{
    for (int dtype = 0; dtype < RC_DTYPE_COUNT; dtype++) {
        int wide = dtype == RC_F32 || dtype == RC_F64;
        CHECK(codec_supports(RC_CODEC_NONE, (rc_dtype)dtype));
        CHECK_EQ(codec_supports(RC_CODEC_BF16, (rc_dtype)dtype), wide);
        CHECK_EQ(codec_supports(RC_CODEC_FP16, (rc_dtype)dtype), wide);
    }
}

/* An average of values near the end of fp16's range stays finite. */
static void fp16_average_does_not_overflow(void)
{
    codec c;
    rc_call call = {.dtype = RC_F32, .op = RC_AVG, .codec = RC_CODEC_FP16};
    float src = 60000.0F, out = 0.0F;
    uint16_t wire;
    codec_init(&c, kernels_find(NULL), &call, 4);
    codec_encode(&c, &wire, &src, 1);
    for (int hop = 1; hop < 4; hop++)
        codec_reduce(&c, &wire, &wire, &src, 1, hop == 3);
    codec_store(&c, &out, &wire, 1);
    CHECK(fabsf(out - src) < 64.0F);
}

/* Wherever in a page the bytes come from and go to: some ways of it are copied otherwise. */
static void plain_copies_at_any_offset(void)
{
    enum { PAGE = 4096, ROOM = 5 * PAGE };
    static _Alignas(PAGE) uint8_t from[ROOM], to[ROOM];
    static const size_t lengths[] = {PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 77, 3 * PAGE};
    rc_call call = {.collective = RC_ALLREDUCE, .dtype = RC_U8};
    codec c;
    codec_init(&c, kernels_find(NULL), &call, 2);
    for (size_t i = 0; i < ROOM; i++)
        from[i] = (uint8_t)(i * 2654435761U >> 13);
    for (size_t offset = 0; offset <= 80; offset++)
        for (size_t i = 0; i < CHECK_COUNT(lengths); i++)
            for (int store = 0; store < 2; store++) {
                size_t n = lengths[i], start = i * 5;
                memset(to, GUARD_BYTE, ROOM);
                if (store)
                    codec_store(&c, to + start + offset, from + start, n);
                else
                    codec_encode(&c, to + start + offset, from + start, n);
                CHECK(memcmp(to + start + offset, from + start, n) == 0);
                CHECK_EQ(to[start + offset + n], GUARD_BYTE);
                CHECK(start + offset == 0 || to[start + offset - 1] == GUARD_BYTE);
            }
}

/* Two that rank 0 and 1 have, and what they have made of each other's, are the same NaN. */
static void a_sum_of_nans_is_the_same_on_all_ranks(void)
{
    static const uint32_t bits[] = {0x7fc12345, 0xffc54321};
    float here, there, joined, x[2];
    memcpy(x, bits, sizeof x);
    rc_call call = {.collective = RC_ALLREDUCE, .dtype = RC_F32, .op = RC_SUM};
    codec c;
    codec_init(&c, kernels_find(NULL), &call, 2);
    codec_combine(&c, &here, &x[0], &x[1], 1, 1);
    codec_combine(&c, &there, &x[1], &x[0], 1, 1);
    codec_join(&c, &joined, 0, (const void *const[]){&x[0], NULL}, 2, &x[1], 1);
    CHECK(memcmp(&here, &there, sizeof here) == 0);
    CHECK(memcmp(&here, &joined, sizeof here) == 0);
}

int main(void)
{
    static const check_test tests[] = {
        {"none", none},
        {"bf16", bf16},
        {"fp16", fp16},
        {"compression_takes_wide_floats_only", compression_takes_wide_floats_only},
        {"fp16_average_does_not_overflow", fp16_average_does_not_overflow},
        {"plain_copies_at_any_offset", plain_copies_at_any_offset},
        {"a_sum_of_nans_is_the_same_on_all_ranks", a_sum_of_nans_is_the_same_on_all_ranks},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

/* test_fingerprint.c - a call in 64 bits: every field comes back, what a collective ignores is 0,
 * a send equals its receive, and any 64 bits give a text.
 */
#include <string.h>

#include "../../csrc/plan/plan.h"
#include "check.h"

typedef struct fields {
    unsigned collective, op, dtype, codec, root;
    uint64_t count;
} fields;

/* By docs/WIRE.md. */
static fields unpack(uint64_t bits)
{
    return (fields){.collective = (unsigned)(bits & 15),
                    .op = (unsigned)(bits >> 4 & 15),
                    .dtype = (unsigned)(bits >> 8 & 15),
                    .codec = (unsigned)(bits >> 12 & 15),
                    .root = (unsigned)(bits >> 16 & 0xfff),
                    .count = bits >> 28};
}

static int reduces(unsigned collective)
{
    return collective == RC_ALLREDUCE || collective == RC_REDUCE_SCATTER || collective == RC_REDUCE;
}

static int rooted(unsigned collective)
{
    return collective == RC_BROADCAST || collective == RC_REDUCE || collective == RC_GATHER ||
           collective == RC_SCATTER;
}

static void check_one(const rc_call *call)
{
    unsigned collective = (unsigned)call->collective;
    fields got = unpack(fingerprint_of(call));
    CHECK_EQ(got.collective, collective == RC_RECV ? RC_SEND : collective);
    CHECK_EQ(got.op, reduces(collective) ? call->op : 0);
    CHECK_EQ(got.dtype, collective == RC_BARRIER ? 0 : call->dtype);
    CHECK_EQ(got.codec, call->codec);
    CHECK_EQ(got.root, rooted(collective) ? call->root : 0);
    CHECK_EQ(got.count, call->count);
}

static void every_field_comes_back(void)
{
    static const uint64_t counts[] = {0, 1, 255, 1 << 20, FINGERPRINT_MAX_COUNT};
    static const int roots[] = {0, 1, 2047, FINGERPRINT_MAX_ROOT};
    for (int collective = 0; collective < RC_COLLECTIVE_COUNT; collective++)
        for (int op = 0; op < RC_OP_COUNT; op++)
            for (int dtype = 0; dtype < RC_DTYPE_COUNT; dtype++)
                for (int codec = 0; codec < RC_CODEC_COUNT; codec++)
                    for (size_t c = 0; c < CHECK_COUNT(counts); c++)
                        for (size_t r = 0; r < CHECK_COUNT(roots); r++)
                            check_one(&(rc_call){.collective = (rc_collective)collective,
                                                 .op = (rc_op)op,
                                                 .dtype = (rc_dtype)dtype,
                                                 .codec = (rc_codec)codec,
                                                 .root = roots[r],
                                                 .count = counts[c]});
}

/* Only what has no root has a caller, which no comparison looks at. */
static void callers(void)
{
    rc_call call = {.collective = RC_ALLGATHER, .dtype = RC_U8, .count = 32, .caller = 2};
    uint64_t ours = fingerprint_of(&call);
    CHECK_EQ(unpack(ours).root, 2);
    call.caller = 7;
    CHECK(fingerprint_of(&call) != ours);
    CHECK(fingerprint_matches(fingerprint_of(&call), ours));
    call.count = 33;
    CHECK(!fingerprint_matches(fingerprint_of(&call), ours));
    rc_call broadcast = {.collective = RC_BROADCAST, .dtype = RC_U8, .root = 1, .caller = 2};
    CHECK_EQ(unpack(fingerprint_of(&broadcast)).root, 1);
    rc_call other = broadcast;
    other.root = 2;
    CHECK(!fingerprint_matches(fingerprint_of(&broadcast), fingerprint_of(&other)));
    CHECK(rc_caller_name(0) == NULL && rc_caller_name(1) != NULL && rc_caller_name(4096) == NULL);
}

/* The two ends name each other as root. */
static void send_meets_receive(void)
{
    rc_call send = {.collective = RC_SEND, .dtype = RC_I32, .root = 3, .count = 77};
    rc_call receive = {.collective = RC_RECV, .dtype = RC_I32, .root = 1, .count = 77};
    CHECK(fingerprint_of(&send) == fingerprint_of(&receive));
    receive.count = 78;
    CHECK(fingerprint_of(&send) != fingerprint_of(&receive));
    receive.count = 77;
    receive.dtype = RC_F32;
    CHECK(fingerprint_of(&send) != fingerprint_of(&receive));
}

static void expect_text(rc_call call, const char *want)
{
    char text[FINGERPRINT_TEXT];
    fingerprint_text(fingerprint_of(&call), text, sizeof text);
    if (!CHECK(strcmp(text, want) == 0))
        fprintf(stderr, "got %s, want %s\n", text, want);
}

static void texts(void)
{
    expect_text(
        (rc_call){
            .collective = RC_ALLREDUCE, .dtype = RC_F32, .count = 1024, .codec = RC_CODEC_BF16},
        "allreduce(f32[1024], op=sum, compression=bf16)");
    expect_text(
        (rc_call){.collective = RC_REDUCE, .op = RC_MAX, .dtype = RC_I64, .root = 2, .count = 7},
        "reduce(i64[7], op=max, root=2)");
    expect_text((rc_call){.collective = RC_BROADCAST, .op = RC_MAX, .dtype = RC_U8, .count = 1},
                "broadcast(u8[1], root=0)");
    expect_text((rc_call){.collective = RC_BARRIER}, "barrier()");
    expect_text((rc_call){.collective = RC_BARRIER, .caller = 15}, "barrier() in split()");
    expect_text((rc_call){.collective = RC_ALLGATHER, .dtype = RC_U8, .count = 32, .caller = 2},
                "allgather(u8[32]) in gather_state_dict()");
    expect_text((rc_call){.collective = RC_ALLGATHER, .count = 1, .caller = 4095},
                "allgather(f16[1]) in ?");
    expect_text((rc_call){.collective = RC_RECV, .dtype = RC_BF16, .root = 5, .count = 9},
                "send/recv(bf16[9])");
}

/* What a peer claims is printed, so no value may reach beyond a table or the buffer. */
static void any_bits_give_text(void)
{
    uint64_t bits = 1;
    for (int i = 0; i < 20000; i++) {
        char text[FINGERPRINT_TEXT];
        bits = bits * 6364136223846793005u + 1442695040888963407u;
        fingerprint_text(i % 3 == 0 ? ~bits : bits ^ bits >> 33, text, sizeof text);
        CHECK(strlen(text) > 0 && strlen(text) < sizeof text - 1);
    }
    char small[8];
    fingerprint_text(UINT64_MAX, small, sizeof small);
    CHECK_EQ(strlen(small), sizeof small - 1);
}

int main(void)
{
    static const check_test tests[] = {
        {"every_field_comes_back", every_field_comes_back}, {"callers", callers},
        {"send_meets_receive", send_meets_receive},         {"texts", texts},
        {"any_bits_give_text", any_bits_give_text},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

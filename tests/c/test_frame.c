/* test_frame.c - the header against the golden frames, every bit flip, and every bound. */
#include <string.h>

#include "../../csrc/base/crc32c.h"
#include "../../csrc/base/error.h"
#include "../../csrc/net/frame.h"
#include "../../csrc/plan/plan.h"
#include "check.h"
#include "golden.h"

enum { EPOCH = 0x11223344, MAX_LENGTH = 4096, ROOM = FRAME_HEADER_BYTES + MAX_LENGTH };

/* ---- golden frames ---- */

static const rc_call allreduce = {.collective = RC_ALLREDUCE,
                                  .op = RC_AVG,
                                  .dtype = RC_F32,
                                  .codec = RC_CODEC_BF16,
                                  .count = 1030};
static const rc_call send_call = {.collective = RC_SEND, .dtype = RC_I32, .root = 1, .count = 2};
static const rc_call barrier = {.collective = RC_BARRIER};
static const rc_call broadcast = {.collective = RC_BROADCAST,
                                  .dtype = RC_U8,
                                  .root = FINGERPRINT_MAX_ROOT,
                                  .count = FINGERPRINT_MAX_COUNT};

static void expect_golden(const char *name, frame_header want, const rc_call *call)
{
    uint8_t wire[ROOM], made[FRAME_HEADER_BYTES];
    size_t n = golden_read(name, wire, sizeof wire);
    if (!CHECK(n >= FRAME_HEADER_BYTES))
        return;
    const uint8_t *payload = wire + FRAME_HEADER_BYTES;
    want.epoch = EPOCH;
    want.length = (uint32_t)(n - FRAME_HEADER_BYTES);
    want.fingerprint = call != NULL ? fingerprint_of(call) : 0;
    frame_encode(made, &want, payload);
    if (!CHECK(memcmp(made, wire, sizeof made) == 0))
        fprintf(stderr, "golden frame %s\n", name);

    frame_header got;
    uint32_t crc;
    CHECK_EQ(frame_decode(wire, EPOCH, MAX_LENGTH, &got, &crc, NULL), RC_OK);
    CHECK_EQ(got.type, want.type);
    CHECK_EQ(got.step, want.step);
    CHECK_EQ(got.flags, want.flags);
    CHECK_EQ(got.epoch, want.epoch);
    CHECK_EQ(got.seq, want.seq);
    CHECK_EQ(got.fingerprint, want.fingerprint);
    CHECK_EQ(got.chunk, want.chunk);
    CHECK_EQ(got.segment, want.segment);
    CHECK_EQ(got.length, want.length);
    CHECK_EQ(got.consumed, want.consumed);
    CHECK(frame_check(payload, got.length, crc));
}

static void golden_frames(void)
{
    expect_golden("data",
                  (frame_header){.type = FRAME_DATA,
                                 .seq = 0x0102030405060708,
                                 .chunk = 2,
                                 .step = 2,
                                 .consumed = 0xfffffff0},
                  &allreduce);
    expect_golden("send",
                  (frame_header){.type = FRAME_DATA, .seq = 7, .flags = FRAME_P2P, .consumed = 96},
                  &send_call);
    expect_golden("barrier",
                  (frame_header){.type = FRAME_DATA, .seq = 41, .chunk = 6, .consumed = 4096},
                  &barrier);
    expect_golden("call", (frame_header){.type = FRAME_CALL, .seq = 41, .consumed = 8192},
                  &broadcast);
    expect_golden("heartbeat", (frame_header){.type = FRAME_HEARTBEAT, .seq = 42, .consumed = 8192},
                  NULL);
    expect_golden("goodbye",
                  (frame_header){.type = FRAME_GOODBYE, .seq = 42, .consumed = 0x80000000}, NULL);
    expect_golden("abort", (frame_header){.type = FRAME_ABORT, .seq = 41}, NULL);
}

static void golden_abort_payload(void)
{
    uint8_t wire[ROOM], made[FRAME_TEXT_BYTES];
    size_t n = golden_read("abort", wire, sizeof wire);
    rc_error error;
    int origin;
    frame_abort_decode(wire + FRAME_HEADER_BYTES, (uint32_t)(n - FRAME_HEADER_BYTES), &error,
                       &origin);
    CHECK_EQ(origin, 1);
    CHECK_EQ(error.code, RC_PEER_LOST);
    CHECK_EQ(error.rank, 3);
    CHECK_EQ(error.seq, 41);
    CHECK(strcmp(error.message, "rank 3 is lost: the connection broke") == 0);
    CHECK_EQ(frame_abort_encode(made, &error, origin), n - FRAME_HEADER_BYTES);
    CHECK(memcmp(made, wire + FRAME_HEADER_BYTES, n - FRAME_HEADER_BYTES) == 0);
}

/* ---- damage ---- */

/* As a lane reads it: header first, then as many bytes as that claims. */
static int accepted(const uint8_t *wire)
{
    frame_header h;
    uint32_t crc;
    return frame_decode(wire, EPOCH, MAX_LENGTH, &h, &crc, NULL) == RC_OK &&
           frame_check(wire + FRAME_HEADER_BYTES, h.length, crc);
}

static void every_flipped_bit_is_seen(void)
{
    static const char *const names[] = {"data",      "send",    "barrier", "call",
                                        "heartbeat", "goodbye", "abort"};
    for (size_t i = 0; i < CHECK_COUNT(names); i++) {
        uint8_t wire[ROOM] = {0};
        size_t n = golden_read(names[i], wire, sizeof wire);
        CHECK(accepted(wire));
        for (size_t bit = 0; bit < 8 * n; bit++) {
            wire[bit / 8] ^= (uint8_t)(1 << bit % 8);
            if (!CHECK(!accepted(wire)))
                fprintf(stderr, "bit %zu of %s\n", bit, names[i]);
            wire[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
    }
}

/* ---- bounds ---- */

/* Makes the header's checksum right again. */
static void seal_header(uint8_t *wire)
{
    uint32_t crc = crc32c(0, wire, FRAME_HEADER_BYTES - 4);
    for (int i = 0; i < 4; i++)
        wire[FRAME_HEADER_BYTES - 4 + i] = (uint8_t)(crc >> 8 * i);
}

static rc_result decode_with(uint8_t type, uint16_t flags, uint32_t epoch, uint32_t length)
{
    uint8_t wire[FRAME_HEADER_BYTES];
    frame_header h = {.type = type, .flags = flags, .epoch = epoch};
    rc_error error;
    uint32_t crc;
    error_clear(&error);
    frame_encode(wire, &h, "");
    for (int i = 0; i < 4; i++) /* the claim alone is judged, before any payload */
        wire[36 + i] = (uint8_t)(length >> 8 * i);
    seal_header(wire);
    rc_result result = frame_decode(wire, EPOCH, MAX_LENGTH, &h, &crc, &error);
    CHECK_EQ(error.code, result);
    CHECK((result == RC_OK) == (error.message[0] == '\0'));
    return result;
}

static void lengths_are_bounded(void)
{
    for (uint8_t type = FRAME_DATA; type <= FRAME_PROBE; type++)
        for (uint32_t length = 0; length <= 2 * MAX_LENGTH; length++) {
            int is_long = type == FRAME_DATA || type == FRAME_PROBE;
            int ok = is_long               ? length <= MAX_LENGTH
                     : type == FRAME_ABORT ? length >= 20 && length <= FRAME_TEXT_BYTES
                                           : length == 0;
            CHECK_EQ(decode_with(type, 0, EPOCH, length), ok ? RC_OK : RC_PROTOCOL);
        }
    CHECK_EQ(decode_with(FRAME_DATA, 0, EPOCH, UINT32_MAX), RC_PROTOCOL);
    CHECK_EQ(decode_with(FRAME_ABORT, 0, EPOCH, UINT32_MAX), RC_PROTOCOL);
}

static void types_flags_and_epochs_are_bounded(void)
{
    for (int type = 0; type < 256; type++)
        CHECK_EQ(decode_with((uint8_t)type, 0, EPOCH, type == FRAME_ABORT ? 20 : 0),
                 type >= FRAME_DATA && type <= FRAME_PROBE ? RC_OK : RC_PROTOCOL);
    for (unsigned flags = 0; flags < 1 << 16; flags++) {
        CHECK_EQ(decode_with(FRAME_DATA, (uint16_t)flags, EPOCH, 0),
                 flags <= FRAME_P2P ? RC_OK : RC_PROTOCOL);
        CHECK_EQ(decode_with(FRAME_HEARTBEAT, (uint16_t)flags, EPOCH, 0),
                 flags == 0 || flags == FRAME_ASKS ? RC_OK : RC_PROTOCOL);
        CHECK_EQ(decode_with(FRAME_CALL, (uint16_t)flags, EPOCH, 0),
                 flags <= FRAME_P2P || flags == (FRAME_P2P | FRAME_ASKS) ? RC_OK : RC_PROTOCOL);
    }
    for (int bit = 0; bit < 32; bit++)
        CHECK_EQ(decode_with(FRAME_DATA, 0, EPOCH ^ UINT32_C(1) << bit, 0), RC_PROTOCOL);
}

static void expect_refusal(const uint8_t *wire, const char *text)
{
    frame_header h;
    uint32_t crc;
    rc_error error;
    error_clear(&error);
    CHECK_EQ(frame_decode(wire, EPOCH, MAX_LENGTH, &h, &crc, &error), RC_PROTOCOL);
    if (!CHECK(strstr(error.message, text) != NULL))
        fprintf(stderr, "the error is: %s\n", error.message);
}

static void magic_and_version_are_judged_first(void)
{
    uint8_t wire[ROOM] = {0};
    golden_read("call", wire, sizeof wire);
    for (int at = 0; at < 3; at++) {
        const char *text = at < 2 ? "starts with" : "of version 3";
        uint8_t kept[ROOM];
        memcpy(kept, wire, sizeof kept);
        kept[at]++;
        expect_refusal(kept, text);
        seal_header(kept);
        expect_refusal(kept, text);
    }
}

/* Before anything of the header is acted on, whatever the flipped bit makes of it. */
static void a_damaged_header_is_called_so(void)
{
    uint8_t wire[ROOM] = {0};
    golden_read("data", wire, sizeof wire);
    for (int bit = 0; bit < 8 * FRAME_HEADER_BYTES; bit++) {
        wire[bit / 8] ^= (uint8_t)(1 << bit % 8);
        expect_refusal(wire, "the header of a frame arrived damaged");
        wire[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
}

/* ---- the text of an abort ---- */

static void abort_text_is_bounded_and_printable(void)
{
    uint8_t payload[FRAME_TEXT_BYTES];
    rc_error error, back;
    int origin;
    error_clear(&error);
    memset(error.message, 'y', sizeof error.message - 1);
    error.message[sizeof error.message - 1] = '\0';
    error.code = RC_MISMATCH;
    error.rank = -1;
    CHECK_EQ(frame_abort_encode(payload, &error, -7), FRAME_TEXT_BYTES);
    frame_abort_decode(payload, FRAME_TEXT_BYTES, &back, &origin);
    CHECK_EQ(origin, -7);
    CHECK_EQ(back.code, RC_MISMATCH);
    CHECK_EQ(back.rank, -1);
    CHECK_EQ(strlen(back.message), FRAME_TEXT_BYTES - 20);

    for (int i = 0; i < 256; i++)
        payload[20 + i] = (uint8_t)i;
    frame_abort_decode(payload, 20 + 256, &back, &origin);
    CHECK_EQ(strlen(back.message), 256); /* no byte ends or forges the text */
    for (int i = 0; i < 256; i++)
        CHECK_EQ((uint8_t)back.message[i], i < 32 || i == 127 ? '?' : i);

    frame_abort_decode(payload, 20, &back, &origin);
    CHECK_EQ(strlen(back.message), 0);
}

static void abort_code_is_always_a_failure(void)
{
    int origin;
    uint8_t payload[20] = {0};
    for (uint32_t code = 0; code < 300; code++) {
        rc_error back;
        payload[0] = (uint8_t)code;
        payload[1] = (uint8_t)(code >> 8);
        frame_abort_decode(payload, sizeof payload, &back, &origin);
        CHECK_EQ(back.code, code > RC_AGAIN && code <= RC_DEVICE ? code : RC_ABORTED);
    }
}

int main(void)
{
    static const check_test tests[] = {
        {"golden_frames", golden_frames},
        {"golden_abort_payload", golden_abort_payload},
        {"every_flipped_bit_is_seen", every_flipped_bit_is_seen},
        {"lengths_are_bounded", lengths_are_bounded},
        {"types_flags_and_epochs_are_bounded", types_flags_and_epochs_are_bounded},
        {"magic_and_version_are_judged_first", magic_and_version_are_judged_first},
        {"a_damaged_header_is_called_so", a_damaged_header_is_called_so},
        {"abort_text_is_bounded_and_printable", abort_text_is_bounded_and_printable},
        {"abort_code_is_always_a_failure", abort_code_is_always_a_failure},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

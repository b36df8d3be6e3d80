/* test_outbox.c - frames on their way out of a socket: what one call sends, what is gone after it.
 */
#include "../../csrc/net/outbox.h"
#include "lane_stream.h"

enum { LENGTH = 1000, WHOLE = FRAME_HEADER_BYTES + LENGTH, ALL = 1 << 20 };

static uint8_t payload[LENGTH];
static out_frame *frames[2 * OUTBOX_FRAMES];

/* So many frames, numbered and sealed. */
static outbox box_of(int count)
{
    outbox box = {0};
    for (int i = 0; i < count; i++) {
        frames[i] = new_frame(FRAME_DATA, (uint64_t)i, payload, LENGTH);
        frame_seal(frames[i]);
        queue_push(&box.list, frames[i]);
    }
    return box;
}

static void free_frames(int count)
{
    for (int i = 0; i < count; i++)
        free(frames[i]);
}

static void a_batch_is_bounded(void)
{
    outbox box = box_of(2 * OUTBOX_FRAMES);
    outbox_batch batch;
    outbox_gather(&box, &batch, ALL);
    CHECK_EQ(batch.count, OUTBOX_FRAMES);
    CHECK_EQ(batch.iovs, 2 * OUTBOX_FRAMES);
    CHECK_EQ(batch.bytes, OUTBOX_FRAMES * WHOLE);
    outbox_gather(&box, &batch, 3 * WHOLE);
    CHECK_EQ(batch.count, 3);
    outbox_gather(&box, &batch, 3 * WHOLE - 1);
    CHECK_EQ(batch.count, 2);
    outbox_gather(&box, &batch, 1); /* one at least */
    CHECK_EQ(batch.count, 1);
    CHECK_EQ(batch.bytes, WHOLE);
    free_frames(2 * OUTBOX_FRAMES);
}

/* Wherever a send ended, the next begins there. */
static void what_was_sent_is_skipped(void)
{
    static const size_t ends[] = {1, FRAME_HEADER_BYTES - 1, FRAME_HEADER_BYTES,
                                  FRAME_HEADER_BYTES + 1, WHOLE - 1};
    for (size_t i = 0; i < CHECK_COUNT(ends); i++) {
        outbox box = box_of(2);
        outbox_batch batch;
        outbox_advance(&box, ends[i]);
        outbox_gather(&box, &batch, ALL);
        CHECK_EQ(batch.bytes, 2 * WHOLE - ends[i]);
        CHECK_EQ(batch.iovs, ends[i] < FRAME_HEADER_BYTES ? 4 : 3);
        CHECK(box.gone.head == NULL);
        outbox_advance(&box, WHOLE - ends[i]);
        CHECK(box.gone.head == frames[0]);
        CHECK(box.list.head == frames[1]);
        CHECK_EQ(box.sent, 0);
        CHECK_EQ(box.sent_bytes, WHOLE);
        free_frames(2);
    }
}

static void what_is_gone_comes_back_in_order(void)
{
    outbox box = box_of(3);
    outbox_advance(&box, 2 * WHOLE + 7);
    outbox_reclaim(&box);
    CHECK(box.gone.head == NULL);
    outbox_advance(&box, WHOLE - 7);
    outbox_reclaim(&box);
    for (int i = 0; i < 3; i++)
        CHECK(queue_pop(&box.back) == frames[i]);
    CHECK(queue_pop(&box.back) == NULL);
    CHECK(box.list.head == NULL);
    free_frames(3);
}

static void a_frame_is_sealed_once(void)
{
    frame_header h;
    uint32_t crc;
    out_frame *frame = new_frame(FRAME_DATA, 5, payload, LENGTH);
    frame_seal(frame);
    frame->header.seq = 6;
    frame_seal(frame);
    CHECK_EQ(frame_decode(frame->header_bytes, EPOCH, MAX_LENGTH, &h, &crc, NULL), RC_OK);
    CHECK_EQ(h.seq, 5);
    CHECK(frame_check(payload, LENGTH, crc));
    free(frame);
}

/* Through a socket that fills up, to a reader, and to one that has gone. */
static void a_socket_takes_what_it_can(void)
{
    int pair[2], total = 0;
    outbox box = box_of(2 * OUTBOX_FRAMES);
    outbox_batch batch;
    static uint8_t stream[2 * OUTBOX_FRAMES * WHOLE];
    size_t have = 0;
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    int small = 4096;
    setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    while (box.list.head != NULL) {
        outbox_gather(&box, &batch, ALL);
        ssize_t sent = outbox_send(&box, pair[0], &batch);
        CHECK(sent >= 0);
        outbox_advance(&box, (size_t)sent);
        total += (int)sent;
        if ((size_t)sent < batch.bytes)
            have += (size_t)recv(pair[1], stream + have, sizeof stream - have, MSG_DONTWAIT);
    }
    CHECK_EQ(total, sizeof stream);
    CHECK(box.last_tx > 0);
    while (have < sizeof stream)
        have += (size_t)recv(pair[1], stream + have, sizeof stream - have, 0);
    CHECK_EQ(check_stream(stream, have), 2 * OUTBOX_FRAMES);
    close(pair[1]);
    free_frames(2 * OUTBOX_FRAMES);
    box = box_of(1);
    outbox_gather(&box, &batch, ALL);
    CHECK_EQ(outbox_send(&box, pair[0], &batch), -1);
    close(pair[0]);
    free_frames(1);
}

int main(void)
{
    static const check_test tests[] = {
        {"a_batch_is_bounded", a_batch_is_bounded},
        {"what_was_sent_is_skipped", what_was_sent_is_skipped},
        {"what_is_gone_comes_back_in_order", what_is_gone_comes_back_in_order},
        {"a_frame_is_sealed_once", a_frame_is_sealed_once},
        {"a_socket_takes_what_it_can", a_socket_takes_what_it_can},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

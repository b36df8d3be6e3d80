/* link_fixture.h - a link whose lanes are halves of socket pairs, and what it sends. Nobody reads
 * at the far ends unless a test does, so what was sent stays unacknowledged; lanes' rates are set
 * by hand. The test holds the engine's lock.
 */
#ifndef RINGCOMM_TEST_LINK_FIXTURE_H
#define RINGCOMM_TEST_LINK_FIXTURE_H

#include "../../csrc/net/link.h"

#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "fds.h"

enum { MOST_LANES = 4, CREDIT = 8000, WHOLE = CREDIT - FRAME_HEADER_BYTES, KEPT = 512 };

typedef struct fixture {
    peer_link link; /* first */
    rc_engine *engine;
    lane *lanes[MOST_LANES];
    int far[MOST_LANES];
    int released, prepared, refuse;
    uint64_t order[KEPT]; /* seq of prepared frames */
} fixture;

static fixture *current; /* of the handler, which is given a lane only */

static int prepare(peer_link *ln, out_frame *frame)
{
    fixture *f = (fixture *)ln;
    if (f->refuse) { /* it goes back to where it came from, for its owner to drop */
        frame->next = ln->queue.head;
        ln->queue.head = frame;
        ln->queue.tail = ln->queue.tail != NULL ? ln->queue.tail : frame;
        return 0;
    }
    f->order[f->prepared++ % KEPT] = frame->header.seq;
    frame_encode(frame->header_bytes, &frame->header, frame->payload);
    return 1;
}

static void on_sent(lane *ln, out_frame *frame)
{
    (void)ln;
    current->released++;
    free(frame);
}

static void on_room(lane *ln)
{
    link_pump(ln->link);
}

static void on_dead(lane *ln)
{
    lane_close(ln);
}

static const lane_handler handler = {.sent = on_sent, .room = on_room, .dead = on_dead};

static fixture *open_fixture(int lanes)
{
    fixture *f = current = calloc(1, sizeof *f);
    f->link =
        (peer_link){.lanes = f->lanes, .lane_count = lanes, .prepare = prepare, .credit = CREDIT};
    CHECK_EQ(rc_engine_create(&f->engine, NULL), RC_OK);
    engine_lock(f->engine);
    for (int i = 0; i < lanes; i++) {
        int pair[2];
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
        lane *ln = f->lanes[i] = calloc(1, sizeof *ln);
        ln->engine = f->engine;
        ln->handler = &handler;
        ln->link = &f->link;
        ln->index = i;
        f->far[i] = pair[1];
        CHECK_EQ(lane_open(ln, pair[0], 1 << 20, 0), RC_OK);
    }
    return f;
}

static void drop(frame_queue *q)
{
    out_frame *frame;
    while ((frame = queue_pop(q)) != NULL)
        free(frame);
}

static void close_fixture(fixture *f)
{
    drop(&f->link.queue);
    for (int send = 0; send < 2; send++)
        while (held_first(&f->link.held, send) != NULL)
            free(held_pop(&f->link.held, send));
    held_destroy(&f->link.held);
    tags_destroy(&f->link.receives_posted);
    tags_destroy(&f->link.sends_held);
    for (int i = 0; i < f->link.lane_count; i++)
        lane_close(f->lanes[i]);
    engine_quiesce(f->engine);
    engine_unlock(f->engine);
    for (int i = 0; i < f->link.lane_count; i++) {
        close(f->far[i]);
        free(f->lanes[i]);
    }
    rc_engine_free(f->engine);
    free(f);
}

static out_frame *new_frame(uint64_t seq, uint16_t flags, uint32_t length)
{
    static const uint8_t payload[1 << 20];
    out_frame *frame = calloc(1, sizeof *frame);
    frame->header =
        (frame_header){.type = FRAME_DATA, .seq = seq, .flags = flags, .length = length};
    frame->payload = payload;
    return frame;
}

static inline void learn(fixture *f, frame_type type, uint64_t seq, uint16_t flags,
                         uint32_t consumed)
{
    frame_header h = {.type = (uint8_t)type, .seq = seq, .flags = flags, .consumed = consumed};
    link_learn(&f->link, &h);
}

static inline int length_of(const frame_queue *q)
{
    int count = 0;
    for (out_frame *frame = q->head; frame != NULL; frame = frame->next)
        count++;
    CHECK((q->head == NULL) == (q->tail == NULL));
    return count;
}

/* More than any credit lets out. */
static inline void send_frames(fixture *f, int count, uint32_t length)
{
    learn(f, FRAME_CALL, 1000000, 0, 0);
    for (int i = 0; i < count; i++)
        link_send(&f->link, new_frame((uint64_t)i, 0, length));
}

#endif

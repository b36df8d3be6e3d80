/* lane_stream.h - frames to push to a lane, a thread that reads what comes of them at the other
 * end, and what that must be.
 */
#ifndef RINGCOMM_TEST_LANE_STREAM_H
#define RINGCOMM_TEST_LANE_STREAM_H

#include <pthread.h>

#include "lane_fixture.h"

static inline out_frame *new_frame(frame_type type, uint64_t seq, const uint8_t *payload,
                                   uint32_t length)
{
    out_frame *frame = calloc(1, sizeof *frame);
    frame->header =
        (frame_header){.type = (uint8_t)type, .epoch = EPOCH, .seq = seq, .length = length};
    frame->payload = payload;
    return frame;
}

static inline void push(fixture *f, int seq, const uint8_t *payload, uint32_t length)
{
    lane_push(&f->ln, new_frame(FRAME_DATA, (uint64_t)seq, payload, length));
}

static inline void expect_sent(fixture *f, int count)
{
    wanted_sent = count;
    drive(f, has_sent, LONG_MS);
    CHECK_EQ(f->sent, count);
    CHECK_EQ(f->deaths, 0);
}

/* ---- what arrives ---- */

typedef struct reader {
    int fd;
    size_t n, most, slowly; /* slowly: bytes per read; 0: as many as come */
    uint8_t *bytes;
    pthread_t thread;
} reader;

static inline void *read_all(void *arg)
{
    reader *r = arg;
    for (;;) {
        size_t want = r->slowly > 0 && r->slowly < r->most - r->n ? r->slowly : r->most - r->n;
        ssize_t got = want > 0 ? recv(r->fd, r->bytes + r->n, want, 0) : 0;
        if (got <= 0)
            return NULL;
        r->n += (size_t)got;
    }
}

/* The stream must be whole frames, numbered 0, 1, ... */
static inline int check_stream(const uint8_t *bytes, size_t n)
{
    size_t at = 0;
    int frames = 0;
    while (at + FRAME_HEADER_BYTES <= n) {
        frame_header h;
        uint32_t crc;
        if (!CHECK_EQ(frame_decode(bytes + at, EPOCH, MAX_LENGTH, &h, &crc, NULL), RC_OK) ||
            !CHECK(at + FRAME_HEADER_BYTES + h.length <= n) ||
            !CHECK(frame_check(bytes + at + FRAME_HEADER_BYTES, h.length, crc)))
            return frames;
        CHECK_EQ(h.seq, frames);
        frames++;
        at += FRAME_HEADER_BYTES + h.length;
    }
    CHECK_EQ(at, n);
    return frames;
}

/* A thread reads up to so many bytes at the lane's other end. */
static inline void start_reading(reader *r, const fixture *f, size_t most, size_t slowly)
{
    *r = (reader){.fd = f->far, .most = most, .slowly = slowly, .bytes = malloc(most)};
    CHECK_EQ(pthread_create(&r->thread, NULL, read_all, r), 0);
}

/* Closes the lane and returns how many frames came of it, which must be whole. */
static inline int finish_reading(reader *r, fixture *f)
{
    lane_close(&f->ln);
    pthread_join(r->thread, NULL);
    int frames = check_stream(r->bytes, r->n);
    free(r->bytes);
    return frames;
}

#endif

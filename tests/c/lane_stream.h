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

typedef struct reader {
    int fd;
    size_t n, most, slowly; /* slowly: bytes per read; 0: as many as come */
    uint8_t *bytes;
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
            !CHECK(frame_check(bytes + at, bytes + at + FRAME_HEADER_BYTES, h.length, crc)))
            return frames;
        CHECK_EQ(h.seq, frames);
        frames++;
        at += FRAME_HEADER_BYTES + h.length;
    }
    CHECK_EQ(at, n);
    return frames;
}

#endif

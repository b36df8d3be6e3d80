/* control.c - control frames. See inside.h. */
#include <stdlib.h>
#include <string.h>

#include "../base/clock.h"
#include "inside.h"

/* Returns the rate that a heartbeat reports for its lane: that of arrivals, in kB/s. */
static uint32_t told_rate(lane *l)
{
    double rate = l->arrivals.rate * 1e6;
    l->arrivals.news = 0;
    l->rate_reported = l->arrivals.rate;
    l->rate_reported_at = clock_ns();
    return rate < (double)UINT32_MAX ? (uint32_t)rate : UINT32_MAX;
}

int comm_send_control(rc_comm *c, peer_link *ln, frame_type type, uint64_t seq,
                      uint64_t fingerprint, uint16_t flags, int lane)
{
    if (c->leaving && type != FRAME_ABORT)
        return 0; /* nothing follows the goodbye */
    uint8_t text[FRAME_TEXT_BYTES];
    uint32_t length =
        type == FRAME_ABORT ? frame_abort_encode(text, &c->error, c->error_origin) : 0;
    out_frame *frame = calloc(1, sizeof *frame + length);
    if (frame == NULL)
        return 0; /* each kind is repeated: a receive's call by comm_announce_again, others by a
                     later one, or by the closed connection */
    memcpy(frame->text, text, length);
    frame->payload = frame->text;
    frame->header = (frame_header){.type = (uint8_t)type,
                                   .flags = flags,
                                   .epoch = c->config.epoch,
                                   .seq = seq,
                                   .fingerprint = fingerprint,
                                   .length = length};
    if (type == FRAME_HEARTBEAT && lane >= 0)
        frame->header.chunk = told_rate(ln->lanes[lane]);
    if (type == FRAME_ABORT && c->error.rail >= 0 && c->error.lane >= 0) {
        frame->header.chunk = (uint32_t)c->error.rail + 1;
        frame->header.segment = (uint32_t)c->error.lane;
    }
    return link_control(ln, frame, lane);
}

void comm_send_on_all_lanes(rc_comm *c, frame_type type, uint64_t seq)
{
    for (int rank = 0; rank < c->env.world_size; rank++) {
        peer_link *ln = c->env.links[rank];
        for (int i = 0; ln != NULL && i < ln->lane_count; i++)
            comm_send_control(c, ln, type, seq, 0, 0, i);
    }
}

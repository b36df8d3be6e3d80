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

/* Returns how many frames a heartbeat reports to have come on its lane. */
static uint32_t told_frames(lane *l)
{
    l->told_frames = l->received_frames;
    l->untold_bytes = 0;
    return lane_received(l);
}

int comm_send_control(rc_comm *c, peer_link *ln, frame_type type, uint64_t seq,
                      uint64_t fingerprint, uint16_t flags, int lane)
{
    if (ln->is_told && type != FRAME_ABORT)
        return 0; /* nothing follows the goodbye */
    uint8_t text[FRAME_TEXT_BYTES];
    uint32_t length = type == FRAME_ABORT ? frame_abort_encode(text, &c->told, c->error_origin) : 0;
    out_frame *frame = calloc(1, sizeof *frame + length);
    if (frame == NULL)
        return 0; /* each kind is repeated: a call of a receive, or for one, by comm_announce_again,
                     others by a later one, or by the closed connection */
    memcpy(frame->text, text, length);
    frame->payload = frame->text;
    frame->header = (frame_header){.type = (uint8_t)type,
                                   .flags = flags,
                                   .epoch = c->config.epoch,
                                   .seq = seq,
                                   .fingerprint = fingerprint,
                                   .length = length};
    if (type == FRAME_HEARTBEAT)
        frame->header.fingerprint = c->submitted;
    if (type == FRAME_HEARTBEAT && lane >= 0) {
        frame->header.chunk = told_rate(ln->lanes[lane]);
        frame->header.segment = ln->lanes[lane]->keeps ? told_frames(ln->lanes[lane]) : 0;
    }
    if (type == FRAME_GOODBYE)
        frame->header.segment = (uint32_t)ln->is_owed;
    if (type == FRAME_ABORT && c->told.rail >= 0 && c->told.lane >= 0) {
        frame->header.chunk = (uint32_t)c->told.rail + 1;
        frame->header.segment = (uint32_t)c->told.lane;
    }
    return link_control(ln, frame, lane);
}

void comm_probe(rc_comm *c, lane *l)
{
    enum { MOST_BYTES = 128 << 10 };
    static uint8_t nothing[MOST_BYTES];
    uint32_t most = c->config.segment_bytes < MOST_BYTES ? c->config.segment_bytes : MOST_BYTES;
    for (uint64_t left = link_probe(l->link, l); left >= most; left -= most) {
        out_frame *frame = calloc(1, sizeof *frame);
        if (frame == NULL)
            return;
        frame->payload = nothing;
        frame->header = (frame_header){
            .type = FRAME_PROBE, .epoch = c->config.epoch, .seq = c->called, .length = most};
        if (!link_control(l->link, frame, l->index))
            return;
        l->probe_end = l->pushed;
    }
}

int comm_tell_lane_down(rc_comm *c, const lane *l, uint16_t made, uint32_t received)
{
    out_frame *frame = calloc(1, sizeof *frame);
    if (frame == NULL)
        return 0;
    frame->payload = frame->text;
    frame->header = (frame_header){.type = FRAME_LANE_DOWN,
                                   .epoch = c->config.epoch,
                                   .chunk = (uint32_t)l->index,
                                   .step = made,
                                   .segment = received};
    return link_control(l->link, frame, -1);
}

void comm_tell_received(rc_comm *c, lane *l)
{
    enum { SEGMENTS = 2, FRAMES = 64 };
    if (l->keeps && (l->untold_bytes >= SEGMENTS * (uint64_t)c->config.segment_bytes ||
                     l->received_frames - l->told_frames >= FRAMES))
        comm_send_control(c, l->link, FRAME_HEARTBEAT, c->called, 0, 0, l->index);
}

void comm_tell_at_end(rc_comm *c)
{
    uint64_t least = c->config.segment_bytes / 4; /* else it can wait */
    for (int rank = 0; rank < c->env.world_size; rank++) {
        peer_link *ln = c->env.links[rank];
        for (int i = 0; ln != NULL && i < ln->lane_count; i++)
            if (ln->lanes[i]->keeps && ln->lanes[i]->untold_bytes >= least)
                comm_send_control(c, ln, FRAME_HEARTBEAT, c->called, 0, 0, i);
    }
}

void comm_ask(rc_comm *c)
{
    for (int rank = 0; rank < c->env.world_size; rank++) {
        peer_link *ln = c->env.links[rank];
        for (int i = 0; ln != NULL && i < ln->lane_count; i++)
            if (lane_is_owed(ln->lanes[i]))
                comm_send_control(c, ln, FRAME_HEARTBEAT, c->called, 0, FRAME_ASKS, i);
    }
}

void comm_send_on_all_lanes(rc_comm *c, peer_link *ln, frame_type type, uint64_t seq)
{
    for (int i = 0; i < ln->lane_count; i++)
        comm_send_control(c, ln, type, seq, 0, 0, i);
}

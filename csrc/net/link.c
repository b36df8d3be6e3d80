/* link.c - see link.h. */
#include "link.h"

#include "../base/clock.h"

enum {
    /* What one lane may hold unsent when it is the only one: enough for one system call to carry
     * several small frames, little enough to keep memory hot. */
    SINGLE_LANE_BACKLOG = 1 << 20,
    /* An idle lane is given a frame after this many on its siblings, so that its rate is known. */
    PROBE_EVERY = 64
};

void queue_push(frame_queue *q, out_frame *frame)
{
    frame->next = NULL;
    if (q->tail != NULL)
        q->tail->next = frame;
    else
        q->head = frame;
    q->tail = frame;
}

out_frame *queue_pop(frame_queue *q)
{
    out_frame *frame = q->head;
    if (frame != NULL) {
        q->head = frame->next;
        if (q->head == NULL)
            q->tail = NULL;
    }
    return frame;
}

/* ---- credit ---- */

static int may_leave(const peer_link *ln, const frame_header *h)
{
    uint64_t called = h->flags & FRAME_P2P ? ln->p2p_called : ln->called;
    return h->seq < called || (ln->sent - ln->peer_consumed) + link_cost(h) <= ln->credit;
}

static void let_go(peer_link *ln, out_frame *frame)
{
    ln->sent += link_cost(&frame->header);
    queue_push(&ln->queue, frame);
}

/* Behind the frames of its own and earlier collectives. */
static void hold(frame_queue *q, out_frame *frame)
{
    if (q->tail == NULL || q->tail->header.seq <= frame->header.seq) {
        queue_push(q, frame);
        return;
    }
    out_frame **place = &q->head;
    while ((*place)->header.seq <= frame->header.seq)
        place = &(*place)->next;
    frame->next = *place;
    *place = frame;
}

void link_learn(peer_link *ln, const frame_header *h)
{
    int32_t more = (int32_t)(h->consumed - (uint32_t)ln->peer_consumed);
    if (more > 0) /* lanes overtake each other */
        ln->peer_consumed += (uint32_t)more;
    if (h->type == FRAME_CALL && (h->flags & FRAME_P2P)) {
        if (h->seq >= ln->p2p_called)
            ln->p2p_called = h->seq + 1;
    } else if (h->type <= FRAME_CALL && !(h->flags & FRAME_P2P)) {
        if (h->seq >= ln->called)
            ln->called = h->seq + 1;
    } else if (h->type == FRAME_HEARTBEAT && h->seq > ln->called) {
        ln->called = h->seq;
    }
    for (int kind = 0; kind < 2; kind++)
        while (ln->held[kind].head != NULL && may_leave(ln, &ln->held[kind].head->header))
            let_go(ln, queue_pop(&ln->held[kind]));
}

int link_owes_credit(const peer_link *ln)
{
    return ln->consumed - ln->consumed_told >= ln->credit / 4;
}

/* ---- striping ---- */

static lane *least_loaded(peer_link *ln)
{
    lane *best = NULL;
    for (int i = 0; i < ln->lane_count; i++) {
        lane *candidate = ln->lanes[i];
        if (candidate->source.fd >= 0 && (best == NULL || candidate->out_bytes < best->out_bytes))
            best = candidate;
    }
    return best;
}

/* The lane that would finish this many bytes first. */
static lane *earliest_finish(peer_link *ln, uint64_t bytes)
{
    lane *best = NULL;
    double best_time = 0.0, fastest = 0.0;
    uint64_t now = clock_ns();
    int probe = ++ln->since_probe >= PROBE_EVERY;
    for (int i = 0; i < ln->lane_count; i++)
        if (ln->lanes[i]->rate > fastest)
            fastest = ln->lanes[i]->rate;
    for (int i = 0; i < ln->lane_count; i++) {
        lane *candidate = ln->lanes[i];
        if (candidate->source.fd < 0)
            continue;
        uint64_t unacked = lane_unacked(candidate);
        lane_measure(candidate, now, unacked);
        if (probe && unacked == 0) {
            ln->since_probe = 0;
            return candidate;
        }
        double rate = candidate->rate > 0.0 ? candidate->rate : fastest > 0.0 ? fastest : 1.0;
        double finish = (double)(unacked + bytes) / rate;
        if (best == NULL || finish < best_time) {
            best = candidate;
            best_time = finish;
        }
    }
    return best;
}

/* The lane for the next frame, NULL if it shall wait. */
static lane *choose(peer_link *ln, uint64_t bytes)
{
    if (ln->lane_count == 1) {
        lane *only = ln->lanes[0];
        return only->source.fd >= 0 && only->out_bytes < SINGLE_LANE_BACKLOG ? only : NULL;
    }
    lane *best = earliest_finish(ln, bytes);
    return best != NULL && best->out_head == NULL ? best : NULL;
}

void link_queue(peer_link *ln, out_frame *frame)
{
    frame_queue *held = &ln->held[(frame->header.flags & FRAME_P2P) != 0];
    int behind = held->head != NULL && held->head->header.seq <= frame->header.seq;
    if (behind || !may_leave(ln, &frame->header))
        hold(held, frame);
    else
        let_go(ln, frame);
}

void link_send(peer_link *ln, out_frame *frame)
{
    link_queue(ln, frame);
    link_pump(ln);
}

void link_pump(peer_link *ln)
{
    while (ln->queue.head != NULL) {
        lane *chosen = choose(ln, link_cost(&ln->queue.head->header));
        if (chosen == NULL)
            return;
        out_frame *frame = queue_pop(&ln->queue);
        if (!ln->prepare(ln, frame))
            return;
        lane_push(chosen, frame);
    }
}

void link_control(peer_link *ln, out_frame *frame, int lane_index)
{
    lane *chosen = lane_index >= 0 ? ln->lanes[lane_index] : least_loaded(ln);
    if (chosen == NULL || chosen->source.fd < 0 || !ln->prepare(ln, frame)) {
        if (chosen == NULL)
            chosen = ln->lanes[0];
        chosen->handler->sent(chosen, frame);
        return;
    }
    lane_push(chosen, frame);
}

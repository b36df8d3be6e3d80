/* dispatch.c - frames that arrive on the lanes, and what leaves there. See inside.h. */
#include "../base/clock.h"
#include "../base/error.h"
#include "inside.h"

static rc_comm *comm_of(const lane *ln)
{
    return ((peer_link *)ln->link)->owner;
}

/* Returns 1 if the collective, or the receive, of this frame has been called here. */
static int is_called_here(const rc_comm *c, const peer_link *ln, const frame_header *h)
{
    if (!comm_is_p2p(h))
        return h->seq < c->called;
    const tag_count *started = tags_find(&ln->started, tags_tag(h->seq));
    return started != NULL && tags_before(tags_number(h->seq), started->receives);
}

/* ---- the lane's handler ---- */

/* Finds the work of a frame that is called here. Fails with data for a collective that is over: the
 * peer made another call, or there is a bug. */
static rc_result find_work(rc_comm *c, const peer_link *ln, const frame_header *h, rc_work **w)
{
    if (c->state != COMM_RUNNING)
        return RC_ABORTED; /* the frame has matched a receive, and that could not start */
    if ((*w = comm_active_find(c, h, ln->peer)) != NULL)
        return RC_OK;
    RC_TRY(comm_check_history(c, h, ln->peer));
    return comm_fail_text(c, RC_PROTOCOL, ln->peer, "rank %d sent data for %s #%llu, which is over",
                          ln->peer, comm_is_p2p(h) ? "send" : "collective",
                          (unsigned long long)(comm_is_p2p(h) ? tags_number(h->seq) : h->seq));
}

/* Finds room for what is only measured as it comes. */
static rc_result begin_probe(rc_comm *c, rx_place *place)
{
    if ((place->buffer = pool_take(c->env.buffers)) == NULL)
        return comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory to receive a frame");
    place->data = place->buffer->data;
    return RC_OK;
}

static rc_result begin_receive(lane *l, const frame_header *h, rx_place *place)
{
    rc_comm *c = comm_of(l);
    peer_link *ln = l->link;
    rc_work *w;
    if (c->state != COMM_RUNNING)
        return RC_ABORTED;
    if (h->type == FRAME_PROBE)
        return begin_probe(c, place);
    if (!is_called_here(c, ln, h) && !comm_match(c, ln, h))
        return comm_unexpected_begin(c, ln, h, place);
    RC_TRY(find_work(c, ln, h, &w));
    return comm_begin_data(c, w, h, ln->peer, place);
}

/* Ends a frame that was early when it began; its collective may have been called since. */
static rc_result settle_early(rc_comm *c, peer_link *ln, const frame_header *h,
                              const uint8_t *payload)
{
    rc_work *w;
    if (!is_called_here(c, ln, h) && !comm_match(c, ln, h))
        return comm_unexpected_keep(c, ln, h, payload);
    RC_TRY(find_work(c, ln, h, &w));
    RC_TRY(comm_deliver(c, w, ln, h, payload));
    comm_finish_complete(c, w);
    return RC_OK;
}

static rc_result end_early(rc_comm *c, peer_link *ln, const frame_header *h, rx_place *place)
{
    pool_buffer *buffer = place->buffer;
    *place = (rx_place){0};
    rc_result result = settle_early(c, ln, h, buffer->data);
    pool_return(c->env.buffers, buffer);
    return result;
}

static rc_result end_data(rc_comm *c, peer_link *ln, const frame_header *h, rx_place *place)
{
    rc_work *w = place->owner;
    if (w == NULL)
        return end_early(c, ln, h, place);
    RC_TRY(comm_end_data(c, w, ln, h, place));
    comm_finish_complete(c, w);
    return RC_OK;
}

static rc_result end_call(rc_comm *c, peer_link *ln, const frame_header *h)
{
    link_pump(ln);
    if (comm_is_p2p(h)) { /* the receiver compares fingerprints when the send's data comes */
        if (h->flags & FRAME_ASKS)
            comm_match_receives(c, tags_tag(h->seq));
        return RC_OK;
    }
    if (!is_called_here(c, ln, h))
        return comm_unexpected_keep(c, ln, h, NULL);
    rc_work *w = comm_active_find(c, h, ln->peer);
    return w != NULL ? comm_check_work(c, w, h, ln->peer) : comm_check_history(c, h, ln->peer);
}

/* Ends what waits for a peer, if it has left. */
static void look_at_end(rc_comm *c, peer_link *ln)
{
    if (!link_is_left(ln))
        return;
    if (ln->owes && link_has_lost(ln)) {
        comm_fail_text(c, RC_PEER_LOST, ln->peer,
                       "rank %d has shut down before all that it had sent came here", ln->peer);
        return;
    }
    comm_forget_kept(c, ln);
    comm_check_left(c, ln);
}

static rc_result end_goodbye(rc_comm *c, lane *l, const frame_header *h)
{
    peer_link *ln = l->link;
    if (l->state == LANE_OPEN)
        lane_move(l, LANE_LEFT);
    ln->left_at = h->seq;
    ln->owes |= h->segment != 0;
    ln->goodbyes++;
    look_at_end(c, ln);
    return RC_OK;
}

/* Returns 1 if a rank gave up on a collective that this rank has not called yet: this rank may be
 * one of those responsible, even if it is not the one named. */
static int is_late(const rc_comm *c, const rc_error *theirs, int origin)
{
    const peer_link *ln = c->env.links[origin];
    return theirs->code == RC_TIMEOUT &&
           (theirs->rank == c->env.rank ||
            (theirs->rank >= 0 && ln != NULL && link_submitted(ln) > c->submitted));
}

/* Returns the error of a rank that another one has given up waiting for. */
static rc_error of_who_is_late(const rc_error *theirs, int origin)
{
    rc_error error;
    error_clear(&error);
    error_set(&error, RC_TIMEOUT, "rank %d gave up waiting for this rank, and said: \"%.400s\"",
              origin, theirs->message);
    error.rank = theirs->rank;
    error.rail = theirs->rail;
    error.lane = theirs->lane;
    error.seq = theirs->seq;
    return error;
}

static rc_result end_abort(rc_comm *c, const lane *l, const frame_header *h)
{
    rc_error theirs;
    int origin;
    frame_abort_decode(l->rx_text, h->length, &theirs, &origin);
    if (h->chunk != 0 && h->chunk <= INT32_MAX && h->segment < LINK_MAX_LANES) {
        theirs.rail = (int32_t)h->chunk - 1;
        theirs.lane = (int32_t)h->segment;
    }
    if (theirs.rank < -1 || theirs.rank >= c->env.world_size)
        theirs.rank = l->peer;
    if (origin < 0 || origin >= c->env.world_size || origin == c->env.rank)
        origin = l->peer;
    int late = is_late(c, &theirs, origin), of_two = theirs.code == RC_MISMATCH || theirs.lane >= 0;
    if (of_two && theirs.rank == c->env.rank)
        theirs.rank = origin; /* two calls differ, or a lane has two ends: each names the other */
    rc_error error = late ? of_who_is_late(&theirs, origin) : theirs;
    comm_check_closed(c);
    comm_fail_by(c, &error, &theirs, origin);
    return RC_ABORTED;
}

/* Reports to the peer how fast its data arrives here: soon if that has changed, else now and then.
 */
static void tell_rate(rc_comm *c, const lane *l)
{
    enum { SOON_MS = 10, SELDOM_MS = 200 };
    double change = l->arrivals.rate / l->rate_reported - 1.0;
    int changed = l->rate_reported == 0.0 || change > 0.02 || change < -0.02;
    if (l->last_rx - l->rate_reported_at >= (changed ? SOON_MS : SELDOM_MS) * CLOCK_MS)
        comm_send_control(c, l->link, FRAME_HEARTBEAT, c->called, 0, 0, l->index);
}

static rc_result end_receive(lane *l, const frame_header *h, rx_place *place)
{
    rc_comm *c = comm_of(l);
    peer_link *ln = l->link;
    if (c->state != COMM_RUNNING)
        return RC_ABORTED;
    link_learn(ln, h);
    switch ((frame_type)h->type) {
    case FRAME_DATA: RC_TRY(end_data(c, ln, h, place)); break;
    case FRAME_CALL: return end_call(c, ln, h);
    case FRAME_HEARTBEAT:
        if (h->chunk != 0)
            lane_set_rate(l, h->chunk * 1e-6);
        RC_TRY(comm_learn_received(c, l, h));
        break;
    case FRAME_GOODBYE: return end_goodbye(c, l, h);
    case FRAME_ABORT: return end_abort(c, l, h);
    case FRAME_LANE_DOWN: RC_TRY(comm_hear_lane_down(c, l, h)); break;
    case FRAME_PROBE: pool_return(c->env.buffers, place->buffer); *place = (rx_place){0};
    }
    comm_tell_received(c, l);
    if (l->arrivals.news)
        tell_rate(c, l);
    if (ln->queue.head != NULL)
        link_pump(ln);
    return RC_OK;
}

static void went(rc_comm *c, rc_work *w)
{
    if (w->is_shared) /* this may have been the last event that a join waited for */
        engine_pump_later(c->engine, &c->member);
    comm_send_more(c, w);
}

static void left(lane *l, out_frame *frame)
{
    rc_comm *c = comm_of(l);
    rc_work *w = frame->owner;
    if (w == NULL || frame->has_left)
        return;
    work_note_sent(w, l->rail, &frame->header);
    if (work_env_keep(&c->env, frame) != RC_OK)
        comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory for a frame that is kept");
    went(c, w);
}

static void sent(lane *l, out_frame *frame)
{
    rc_comm *c = comm_of(l);
    rc_work *w = frame->owner;
    if (w != NULL && !frame->has_left && !l->tx_closed)
        work_note_sent(w, l->rail, &frame->header);
    work_env_release(&c->env, frame);
    if (w != NULL)
        went(c, w);
}

static void room(lane *l)
{
    link_pump(l->link);
}

/* Returns 1 if a frame's payload has come damaged for the second time: it is so at the sender. All
 * probes look alike. */
static int is_damaged_again(peer_link *ln, const lane *l)
{
    const frame_header *h = &l->rx, last = ln->damaged;
    if (l->error.code != RC_PROTOCOL || !l->in_payload || h->type == FRAME_PROBE)
        return 0;
    ln->damaged = *h;
    return h->type == last.type && h->seq == last.seq && h->fingerprint == last.fingerprint &&
           h->chunk == last.chunk && h->step == last.step && h->segment == last.segment;
}

static void dead(lane *l)
{
    rc_comm *c = comm_of(l);
    comm_check_closed(c);
    peer_link *ln = l->link;
    int is_over = l->state == LANE_LEFT || c->state != COMM_RUNNING;
    if (is_over || (l->keeps && ln->goodbyes > 0 && !ln->owes)) { /* it brings nothing more */
        lane_close(l);
        if (!is_over)
            look_at_end(c, ln);
        return;
    }
    rc_error error;
    comm_blame_lane(c, l, &error);
    if (!l->keeps && error.code != RC_PROTOCOL) /* on a protocol error the peer gets the abort */
        lane_close(l);
    if (is_damaged_again(ln, l))
        comm_fail(c, &error);
    comm_lose_lane(c, l, &error);
}

const lane_handler comm_lane_handler = {.begin = begin_receive,
                                        .end = end_receive,
                                        .left = left,
                                        .sent = sent,
                                        .room = room,
                                        .dead = dead};

/* ---- what is sent ---- */

int comm_prepare_frame(peer_link *ln, out_frame *frame)
{
    rc_comm *c = ln->owner;
    uint32_t expected = frame->header.length;
    if (frame->sealed)
        return 1; /* it goes out again */
    if (!work_env_encode(&c->env, frame)) {
        frame->next = ln->queue.head; /* comm_settle releases it with the others */
        ln->queue.head = frame;
        if (ln->queue.tail == NULL)
            ln->queue.tail = frame;
        comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory for a segment of %u bytes",
                       c->env.segment_bytes);
        return 0;
    }
    if (frame->header.type == FRAME_DATA)
        ln->sent -= expected - frame->header.length; /* the encoding took less of the credit */
    frame->header.consumed = ln->consumed;
    if (frame->header.type != FRAME_PROBE) /* which comes late */
        ln->consumed_reported = ln->consumed;
    if (frame->header.type == FRAME_DATA) {
        c->payload_bytes += frame->header.length;
        work_note_start(frame->owner);
    }
    return 1;
}

/* recover.c - lanes that are lost while their peer lives. See inside.h and net/lane.h.
 *
 *     here   a lane dies ---> lane_lose, LANE_DOWN by another lane: so many frames came here
 *     peer   lane_lose <----- the same back; what did not come goes out again, by other lanes
 *
 * Each end gives a lane up once and for good, and tells so once: from then on it reads nothing more
 * of it, so the count that it tells is final. The other end releases as many of the frames that it
 * has kept, and sends all that come after them again. So a frame is applied once, whatever was on
 * its way; one that was half there is forgotten (work_abandon). With the last lane of a link the
 * counts wait for the marks of the next connection (rc_lane_mark).
 *
 * What a frame still needs is its payload as it was. One that goes out again has it for itself; one
 * that is only kept may have it in the caller's memory until its work ends (work_env_keep). That
 * does not change before: a work overwrites a part of its source only with a result that could not
 * be without it.
 *
 * Invariant. Who says goodbye to a peer owes it no frame, or says that it may; so after a goodbye
 * no lane is recovered.
 */
#include <unistd.h>

#include "../base/clock.h"
#include "../base/error.h"
#include "inside.h"

/* ---- what has come ---- */

rc_result comm_learn_received(rc_comm *c, lane *l, const frame_header *h)
{
    const peer_link *ln = l->link;
    if (h->segment != 0 && !lane_acknowledge(l, h->segment)) /* 0: it is not about this lane */
        return comm_fail_text(c, RC_PROTOCOL, ln->peer,
                              "rank %d says that frames came which were not sent", ln->peer);
    if (h->flags & FRAME_ASKS)
        comm_send_control(c, l->link, FRAME_HEARTBEAT, c->called, 0, 0, l->index);
    return RC_OK;
}

/* ---- a lane that is lost ---- */

void comm_drop_half_received(rc_comm *c, lane *l)
{
    pool_return(c->env.buffers, l->rx_place.buffer);
    l->rx_place = (rx_place){0};
}

/* Forgets a frame of which a part has come. */
static void abandon_half_received(rc_comm *c, lane *l)
{
    peer_link *ln = l->link;
    if (!l->in_payload)
        return;
    l->in_payload = 0;
    if (l->rx_place.owner != NULL)
        work_abandon(l->rx_place.owner, &l->rx, &l->rx_place);
    else if (l->rx.type == FRAME_DATA)
        ln->early_bytes -= link_cost(&l->rx);
    comm_drop_half_received(c, l);
}

int comm_has_another(const lane *l)
{
    const peer_link *ln = l->link;
    for (int i = 0; i < ln->lane_count; i++) {
        const lane *other = ln->lanes[i];
        if (other != l && other->state == LANE_OPEN && lane_takes(other) && !other->health.lost)
            return 1;
    }
    return 0;
}

void comm_tell_lost_lanes(rc_comm *c, peer_link *ln)
{
    for (int i = 0; i < ln->lane_count; i++) {
        lane *l = ln->lanes[i];
        if (l->state == LANE_LOST && !l->is_told)
            l->is_told = comm_tell_lane_down(c, l, (uint16_t)l->made, lane_received(l));
    }
}

int comm_can_give_up(const lane *l)
{
    const peer_link *ln = l->link;
    return l->keeps && l->state == LANE_OPEN && !(ln->goodbyes > 0 && ln->owes);
}

int comm_give_up_lane(rc_comm *c, lane *l)
{
    peer_link *ln = l->link;
    if (!comm_can_give_up(l))
        return 0;
    if (ln->is_told) {
        lane_close(l);
        return 1;
    }
    abandon_half_received(c, l);
    lane_lose(l);
    comm_tell_lost_lanes(c, ln);
    link_pump(ln);
    return 1;
}

const lane *comm_last_lost(const peer_link *ln)
{
    const lane *last = NULL;
    for (int i = 0; i < ln->lane_count; i++) {
        const lane *l = ln->lanes[i];
        if (l->state == LANE_OPEN)
            return NULL;
        if (l->state == LANE_LOST && (last == NULL || l->lost_at > last->lost_at))
            last = l;
    }
    return last;
}

/* ---- what goes out again ---- */

/* Has the peer be told again that a lane is lost. */
static void tell_again(const peer_link *ln, const frame_header *h)
{
    lane *l = ln->lanes[h->chunk];
    if (h->step == (uint16_t)l->made)
        l->is_told = 0;
}

/* Readies a data frame to go out again. Returns RC_NO_MEMORY or RC_OK. */
static rc_result ready_again(rc_comm *c, const peer_link *ln, out_frame *frame)
{
    rc_work *w = frame->owner;
    if (frame->payload == NULL && frame->header.length > 0)
        return RC_NO_MEMORY;
    if (frame->has_left) {
        RC_TRY(work_env_own(&c->env, frame));
        if (w != NULL)
            comm_finish_complete(c, w);
    }
    frame->header.consumed = ln->consumed;
    frame->sealed = 0;
    frame_seal(frame);
    return RC_OK;
}

static rc_result send_again(rc_comm *c, peer_link *ln, frame_queue *rest)
{
    frame_queue data = {0};
    out_frame *frame;
    rc_result result = RC_OK;
    while ((frame = queue_pop(rest)) != NULL)
        switch ((frame_type)frame->header.type) {
        case FRAME_DATA:
            queue_push(&data, frame);
            if (ready_again(c, ln, frame) != RC_OK)
                result = RC_NO_MEMORY;
            break;
        case FRAME_CALL:
            frame_seal(frame);
            queue_push(&data, frame);
            break;
        case FRAME_LANE_DOWN: tell_again(ln, &frame->header); /* fall through */
        default: work_env_release(&c->env, frame);
        }
    c->has_asked = 0;
    comm_tell_lost_lanes(c, ln);
    link_send_again(ln, &data);
    link_pump(ln);
    comm_send_control(c, ln, FRAME_HEARTBEAT, c->called, 0, 0, -1); /* what the lost one has told */
    return result;
}

/* Sends again what the peer has not got of a lost lane, by its count. Fails if that cannot be. */
static rc_result settle_lane(rc_comm *c, lane *l, uint32_t received)
{
    peer_link *ln = l->link;
    frame_queue rest = {0};
    if (l->is_settled)
        return RC_OK;
    if (!lane_settle(l, received, &rest))
        return comm_fail_text(c, RC_PROTOCOL, ln->peer,
                              "rank %d says that frames came which were not sent", ln->peer);
    l->is_settled = 1;
    if (send_again(c, ln, &rest) != RC_OK)
        return comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory to send a frame again");
    return RC_OK;
}

rc_result comm_hear_lane_down(rc_comm *c, const lane *by, const frame_header *h)
{
    const peer_link *ln = by->link;
    lane *l = h->chunk < (uint32_t)ln->lane_count ? ln->lanes[h->chunk] : NULL;
    if (l == NULL || l == by || !c->config.recovers)
        return comm_fail_text(c, RC_PROTOCOL, ln->peer,
                              "rank %d has given up lane %u, which is none", ln->peer, h->chunk);
    int16_t later = (int16_t)(h->step - (uint16_t)l->made);
    if (later > 0) { /* a connection that is not taken over here, and now never will be */
        l->ticket++;
        comm_tell_lane_down(c, l, h->step, 0);
    }
    if (later != 0)
        return RC_OK;
    comm_give_up_lane(c, l);
    return l->state == LANE_LOST ? settle_lane(c, l, h->segment) : RC_OK;
}

/* ---- a lane that is made anew ---- */

rc_result comm_open_lane(rc_comm *c, lane *l, int fd)
{
    const peer_link *ln = l->link;
    RC_TRY(lane_open(l, fd, c->config.segment_bytes, c->config.epoch));
    l->sender = c->sender;
    l->keeps = c->config.recovers;
    if (ln->lane_count > 1)
        lane_stripe(l);
    return RC_OK;
}

static int can_be_made_anew(const lane *l)
{
    const peer_link *ln = l->link;
    return l->state == LANE_LOST && !ln->is_told;
}

rc_result comm_drop_lane(rc_comm *c, int peer, int index, rc_lane_mark *out)
{
    lane *l = c->env.links[peer]->lanes[index];
    if (c->env.links[peer]->is_told)
        return RC_INVALID_STATE; /* its last frames may be on their way */
    comm_give_up_lane(c, l);
    *out = (rc_lane_mark){l->made, lane_received(l), l->before, l->previous, ++l->ticket};
    return can_be_made_anew(l) ? RC_OK : RC_INVALID_STATE;
}

/* Returns how many of the frames have come that left by our last connection. */
static uint32_t count_for(const rc_lane_mark *ours, const rc_lane_mark *theirs)
{
    if (theirs->made == ours->made)
        return theirs->received;
    return theirs->before == ours->made ? theirs->previous : 0;
}

rc_result comm_renew_lane(rc_comm *c, int peer, int index, int fd, const rc_lane_mark *ours,
                          const rc_lane_mark *theirs)
{
    peer_link *ln = c->env.links[peer];
    lane *l = ln->lanes[index];
    uint32_t last = ours->made > theirs->made ? ours->made : theirs->made;
    if (!can_be_made_anew(l) || l->ticket != ours->ticket) {
        close(fd);
        return RC_INVALID_STATE;
    }
    frame_queue rest = {0};
    if (!l->is_settled && !lane_settle(l, count_for(ours, theirs), &rest)) {
        close(fd);
        return comm_fail_text(c, RC_PROTOCOL, peer,
                              "rank %d says that frames came which were not sent", peer);
    }
    if (theirs->made >= ours->made) { /* else it is still to learn what came before */
        l->before = ours->made;
        l->previous = lane_received(l);
    }
    lane_reset(l, last + 1);
    rc_result result = comm_open_lane(c, l, fd);
    if (send_again(c, ln, &rest) != RC_OK)
        return comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory to send a frame again");
    if (result != RC_OK)
        return comm_fail_text(c, result, c->env.rank,
                              "a lane that was made anew is no usable socket");
    return RC_OK;
}

/* ---- ends ---- */

rc_result comm_lose_peer(rc_comm *c, int peer)
{
    peer_link *ln = c->env.links[peer];
    const lane *lost = comm_last_lost(ln);
    rc_error why;
    if (lost == NULL || ln->is_told || link_is_left(ln))
        return RC_INVALID_STATE;
    if (c->leaving) {
        ln->is_told = 1; /* nobody is left to hear the goodbye */
        return RC_OK;
    }
    int is_known = lost->error.code != RC_OK;
    error_clear(&why);
    error_set(&why, RC_PEER_LOST, "rank %d is lost: %s%sit does not listen any more", peer,
              is_known ? lost->error.message : "", is_known ? "; " : "");
    why.rank = peer;
    why.rail = lost->rail;
    why.lane = lost->index;
    why.sys_errno = lost->error.sys_errno;
    comm_fail(c, &why);
    return RC_OK;
}

void comm_forget_kept(rc_comm *c, peer_link *ln)
{
    out_frame *frame;
    for (int i = 0; i < ln->lane_count; i++) {
        lane *l = ln->lanes[i];
        if (l->state == LANE_OPEN)
            lane_move(l, LANE_LEFT); /* its goodbye may be lost */
        if (l->state == LANE_LOST)
            lane_close(l);
        else if (l->keeps)
            lane_forget_kept(l);
    }
    frame_queue again = ln->queue;
    ln->queue = (frame_queue){0};
    while ((frame = queue_pop(&again)) != NULL)
        if (frame->has_left) {
            ln->queued -= link_cost(&frame->header);
            work_env_release(&c->env, frame);
        } else {
            queue_push(&ln->queue, frame);
        }
}

int comm_owes(const peer_link *ln)
{
    int owes = 0;
    for (int i = 0; i < ln->lane_count; i++)
        owes |= ln->lanes[i]->keeps && (lane_is_owed(ln->lanes[i]) || ln->queue.head != NULL);
    return owes && !link_is_left(ln);
}

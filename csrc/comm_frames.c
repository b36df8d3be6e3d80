/* comm_frames.c - what arrives on the lanes of a communicator, and what is announced on them.
 * See comm.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/clock.h"
#include "comm.h"
#include "plan/fingerprint.h"

static rc_comm *comm_of(const lane *ln)
{
    return ((peer_link *)ln->link)->owner;
}

/* ---- which collective a frame belongs to ---- */

static int is_p2p(const frame_header *h)
{
    return (h->flags & FRAME_P2P) != 0;
}

/* 1 if the collective, or the receive, of this frame has been called here. */
static int is_called(const rc_comm *c, const peer_link *ln, const frame_header *h)
{
    if (!is_p2p(h))
        return h->seq < c->called;
    const tag_count *started = tags_find(&ln->started, tags_tag(h->seq));
    return started != NULL && tags_number(h->seq) < started->receives;
}

static int belongs(const rc_work *w, const frame_header *h, int from)
{
    if (w->seq != h->seq || w->flags != h->flags || (w->late && w->env == NULL))
        return 0;
    return !is_p2p(h) || (w->call.collective == RC_RECV && w->call.root == from);
}

static rc_work *find_active(const rc_comm *c, const frame_header *h, int from)
{
    rc_work *w = c->active_head;
    while (w != NULL && !belongs(w, h, from))
        w = w->next;
    return w;
}

static rc_result mismatch(rc_comm *c, const frame_header *h, int from, uint64_t ours)
{
    char here[96], there[96], what[40] = "collective";
    uint64_t number = is_p2p(h) ? tags_number(h->seq) : h->seq;
    fingerprint_text(ours, here, sizeof here);
    fingerprint_text(h->fingerprint, there, sizeof there);
    if (is_p2p(h) && tags_tag(h->seq) == 0)
        snprintf(what, sizeof what, "send/recv");
    else if (is_p2p(h))
        snprintf(what, sizeof what, "send/recv of tag %u", tags_tag(h->seq));
    return comm_fail_text(c, RC_MISMATCH, from,
                          "ranks differ in %s #%llu: rank %d called %s, rank %d called %s", what,
                          (unsigned long long)number, c->env.rank, here, from, there);
}

/* The same for a collective that is over here, as far as it is remembered. */
static rc_result check_history(rc_comm *c, const frame_header *h, int from)
{
    if (is_p2p(h) || c->called - h->seq > COMM_HISTORY)
        return RC_OK;
    uint64_t ours = c->history[h->seq % COMM_HISTORY];
    return ours == h->fingerprint ? RC_OK : mismatch(c, h, from, ours);
}

static rc_result check_work(rc_comm *c, const rc_work *w, const frame_header *h, int from)
{
    return w->fingerprint == h->fingerprint ? RC_OK : mismatch(c, h, from, w->fingerprint);
}

/* ---- frames that come before their collective is called ---- */

/* A peer this far ahead may be out of credit, and then holds back what is wanted here with all the
 * rest, unless it knows what has been called: it is told so when it gets there, and of each call
 * from then on. Below this, what it does not know of leaves it credit for a segment or more. */
static int is_far_ahead(const peer_link *ln)
{
    return ln->early_bytes > ln->credit / 4;
}

static void tell_calls(rc_comm *c, peer_link *ln)
{
    comm_send_control(c, ln, FRAME_HEARTBEAT, c->called, 0, 0, -1);
    for (const rc_work *w = c->active_head; w != NULL && c->state == COMM_RUNNING; w = w->next)
        if (w->call.collective == RC_RECV && w->call.root == ln->peer && w->env != NULL)
            comm_send_control(c, ln, FRAME_CALL, w->seq, w->fingerprint, w->flags, -1);
}

static rc_result begin_early(rc_comm *c, peer_link *ln, const frame_header *h, rx_place *place)
{
    if (ln->early_bytes + link_cost(h) > ln->credit)
        return comm_fail_text(c, RC_PROTOCOL, ln->peer,
                              "rank %d sent more ahead than its credit allows", ln->peer);
    if ((place->buffer = pool_take(c->env.buffers)) == NULL)
        return comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory for a segment of %u bytes",
                              c->env.segment_bytes);
    place->data = place->buffer->data;
    int was_far_ahead = is_far_ahead(ln);
    ln->early_bytes += link_cost(h);
    if (!was_far_ahead && is_far_ahead(ln))
        tell_calls(c, ln);
    return RC_OK;
}

/* Behind the frames of its own and earlier collectives; lanes overtake each other. */
static void insert_early(early_queue *q, early_frame *early)
{
    early_frame **place = &q->head;
    if (q->tail != NULL && q->tail->header.seq <= early->header.seq)
        place = &q->tail->next;
    while (*place != NULL && (*place)->header.seq <= early->header.seq)
        place = &(*place)->next;
    early->next = *place;
    *place = early;
    if (early->next == NULL)
        q->tail = early;
}

/* The collective may be on its way to links already (comm_shared.c). */
static rc_result check_waiting(rc_comm *c, const peer_link *ln, const frame_header *h)
{
    const rc_work *w = find_active(c, h, ln->peer);
    return w != NULL ? check_work(c, w, h, ln->peer) : RC_OK;
}

/* Keeps a copy of its own size: segments may be small, and many. */
static rc_result keep_early(rc_comm *c, peer_link *ln, const frame_header *h,
                            const uint8_t *payload)
{
    int is_call = h->type == FRAME_CALL;
    RC_TRY(check_waiting(c, ln, h));
    if (is_call && c->early_calls >= COMM_MAX_EARLY_CALLS)
        return RC_OK; /* an announcement only helps to find mismatches sooner */
    early_frame *early = malloc(sizeof *early + h->length);
    if (early == NULL)
        return comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory for an early frame");
    early->header = *h;
    if (h->length > 0)
        memcpy(early->payload, payload, h->length);
    c->early_calls += is_call;
    insert_early(&ln->early[is_p2p(h)], early);
    return RC_OK;
}

static void consume(rc_comm *c, peer_link *ln, const frame_header *h)
{
    ln->consumed += link_cost(h);
    if (link_owes_credit(ln))
        comm_send_control(c, ln, FRAME_HEARTBEAT, c->called, 0, 0, -1);
}

/* A payload that a work could not take. */
static rc_result fail_at_end(rc_comm *c, const peer_link *ln, const frame_header *h, rc_result why)
{
    if (why != RC_PROTOCOL)
        return comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory for a frame");
    return comm_fail_text(c, RC_PROTOCOL, ln->peer,
                          "rank %d: the payload of segment %u of chunk %u is none of its codec",
                          ln->peer, h->segment, h->chunk);
}

/* Delivers one early frame to the work that it was for. The caller holds a reference to w. */
static rc_result deliver_early(rc_comm *c, rc_work *w, peer_link *ln, const frame_header *h,
                               const uint8_t *payload)
{
    RC_TRY(check_work(c, w, h, ln->peer));
    if (h->type == FRAME_CALL)
        return RC_OK;
    rx_place place = {0};
    rc_error why;
    error_clear(&why);
    if (work_begin(w, h, ln->peer, &place, &why) != RC_OK)
        return comm_fail_text(c, why.code, ln->peer, "rank %d: %s", ln->peer, why.message);
    if (h->length > 0)
        memcpy(place.data, payload, h->length);
    ln->early_bytes -= link_cost(h);
    consume(c, ln, h);
    if (c->state != COMM_RUNNING) {
        pool_return(c->env.buffers, place.buffer);
        return RC_ABORTED;
    }
    rc_result result = work_end(w, h, &place);
    if (result != RC_OK)
        return fail_at_end(c, ln, h, result);
    return c->state == COMM_RUNNING ? RC_OK : RC_ABORTED;
}

/* Takes the first frame of seq or a later one; NULL if there is none. Collectives, and the receives
 * of one tag, are called in order of seq, so what is wanted of a tag is the first of it. */
static early_frame *take_early(rc_comm *c, early_queue *q, uint64_t seq)
{
    early_frame **place = &q->head, *before = NULL;
    while (*place != NULL && (*place)->header.seq < seq) {
        before = *place;
        place = &before->next;
    }
    early_frame *early = *place;
    if (early == NULL)
        return NULL;
    *place = early->next;
    if (*place == NULL)
        q->tail = before;
    c->early_calls -= early->header.type == FRAME_CALL;
    return early;
}

/* 1 if a frame of this very seq is there. */
static int has_early(const early_queue *q, uint64_t seq)
{
    const early_frame *early = q->head;
    while (early != NULL && early->header.seq < seq)
        early = early->next;
    return early != NULL && early->header.seq == seq;
}

int comm_has_early_send(const peer_link *ln, uint64_t name)
{
    return has_early(&ln->early[1], name);
}

static rc_result replay_link(rc_comm *c, rc_work *w, peer_link *ln)
{
    early_queue *q = &ln->early[(w->flags & FRAME_P2P) != 0];
    rc_result result = RC_OK;
    int mine =
        !(w->flags & FRAME_P2P) || (w->call.collective == RC_RECV && w->call.root == ln->peer);
    while (result == RC_OK && mine && has_early(q, w->seq)) {
        early_frame *early = take_early(c, q, w->seq);
        result = deliver_early(c, w, ln, &early->header, early->payload);
        free(early);
    }
    return result;
}

rc_result comm_replay_early(rc_comm *c, rc_work *w)
{
    for (int rank = 0; rank < c->env.world_size; rank++)
        if (c->env.links[rank] != NULL)
            RC_TRY(replay_link(c, w, c->env.links[rank]));
    return RC_OK;
}

rc_result comm_check_early(rc_comm *c, const rc_work *w)
{
    for (int rank = 0; rank < c->env.world_size; rank++)
        for (early_frame *early = c->link_storage[rank].early[0].head; early != NULL;
             early = early->next)
            if (belongs(w, &early->header, rank))
                RC_TRY(check_work(c, w, &early->header, rank));
    return RC_OK;
}

void comm_drop_early(rc_comm *c)
{
    for (int rank = 0; rank < c->env.world_size; rank++)
        for (int kind = 0; kind < 2; kind++) {
            early_queue *q = &c->link_storage[rank].early[kind];
            while (q->head != NULL)
                free(take_early(c, q, 0));
        }
}

/* ---- the lane's handler ---- */

/* Data for a collective that is over here: either another collective over there, or a bug. */
static rc_result no_such_work(rc_comm *c, const peer_link *ln, const frame_header *h)
{
    RC_TRY(check_history(c, h, ln->peer));
    return comm_fail_text(c, RC_PROTOCOL, ln->peer,
                          "rank %d sent data for collective #%llu, which is over", ln->peer,
                          (unsigned long long)h->seq);
}

static rc_result begin(lane *l, const frame_header *h, rx_place *place)
{
    rc_comm *c = comm_of(l);
    peer_link *ln = l->link;
    if (c->state != COMM_RUNNING)
        return RC_ABORTED;
    if (!is_called(c, ln, h) && !comm_match(c, ln, h))
        return begin_early(c, ln, h, place);
    rc_work *w = find_active(c, h, ln->peer);
    if (w == NULL)
        return no_such_work(c, ln, h);
    RC_TRY(check_work(c, w, h, ln->peer));
    rc_error why;
    error_clear(&why);
    if (work_begin(w, h, ln->peer, place, &why) != RC_OK)
        return comm_fail_text(c, why.code, ln->peer, "rank %d: %s", ln->peer, why.message);
    return RC_OK;
}

/* A frame that was early when it began; its collective may have been called since. */
static rc_result settle_early(rc_comm *c, peer_link *ln, const frame_header *h,
                              const uint8_t *payload)
{
    if (!is_called(c, ln, h) && !comm_match(c, ln, h))
        return keep_early(c, ln, h, payload);
    rc_work *w = find_active(c, h, ln->peer);
    if (w == NULL)
        return no_such_work(c, ln, h);
    work_retain(w);
    rc_result result = deliver_early(c, w, ln, h, payload);
    comm_finish_complete(c, w);
    work_release(w);
    return result;
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
    consume(c, ln, h);
    if (c->state != COMM_RUNNING)
        return RC_ABORTED;
    work_retain(w); /* it may end within work_end */
    rc_result result = work_end(w, h, place);
    if (result != RC_OK)
        fail_at_end(c, ln, h, result);
    comm_finish_complete(c, w);
    work_release(w);
    return c->state == COMM_RUNNING ? RC_OK : RC_ABORTED;
}

static rc_result end_call(rc_comm *c, peer_link *ln, const frame_header *h)
{
    link_pump(ln);
    if (c->state != COMM_RUNNING)
        return RC_ABORTED;
    if (is_p2p(h))
        return RC_OK; /* the send that it answers is told by its data, not by this */
    if (!is_called(c, ln, h))
        return keep_early(c, ln, h, NULL);
    rc_work *w = find_active(c, h, ln->peer);
    return w != NULL ? check_work(c, w, h, ln->peer) : check_history(c, h, ln->peer);
}

static rc_result end_goodbye(rc_comm *c, lane *l, const frame_header *h)
{
    peer_link *ln = l->link;
    l->goodbye = 1;
    ln->left_at = h->seq;
    if (++ln->goodbyes == ln->lane_count)
        comm_check_left(c, ln);
    return c->state == COMM_RUNNING ? RC_OK : RC_ABORTED;
}

static rc_result end_abort(rc_comm *c, const lane *l, const frame_header *h)
{
    rc_error theirs;
    frame_abort_decode(l->rx_text, h->length, &theirs);
    if (h->chunk != 0 && h->chunk <= INT32_MAX && h->segment < LINK_MAX_LANES) {
        theirs.rail = (int32_t)h->chunk - 1;
        theirs.lane = (int32_t)h->segment;
    }
    if (theirs.rank < -1 || theirs.rank >= c->env.world_size)
        theirs.rank = l->peer;
    if (theirs.code == RC_MISMATCH && theirs.rank == c->env.rank)
        theirs.rank = l->peer; /* two ranks differ: each holds it against the other */
    comm_fail(c, &theirs);
    return RC_ABORTED;
}

/* Tells the peer how fast its data arrives here: soon if that has changed, else now and then. */
static void tell_rate(rc_comm *c, const lane *l)
{
    enum { SOON_MS = 10, SELDOM_MS = 200 };
    double change = l->arrivals.rate / l->told - 1.0;
    int changed = l->told == 0.0 || change > 0.02 || change < -0.02;
    if (l->last_rx - l->told_at >= (changed ? SOON_MS : SELDOM_MS) * CLOCK_MS)
        comm_send_control(c, l->link, FRAME_HEARTBEAT, c->called, 0, 0, l->index);
}

static rc_result end(lane *l, const frame_header *h, rx_place *place)
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
        break;
    case FRAME_GOODBYE: return end_goodbye(c, l, h);
    case FRAME_ABORT: return end_abort(c, l, h);
    }
    if (l->arrivals.news)
        tell_rate(c, l);
    if (ln->queue.head != NULL)
        link_pump(ln);
    return c->state == COMM_RUNNING ? RC_OK : RC_ABORTED;
}

static void sent(lane *l, out_frame *frame)
{
    rc_comm *c = comm_of(l);
    rc_work *w = frame->owner;
    work_env_release(&c->env, frame);
    if (w != NULL)
        comm_go_on(c, w);
}

static void room(lane *l)
{
    link_pump(l->link);
}

static void dead(lane *l)
{
    rc_comm *c = comm_of(l);
    if (l->goodbye || c->state != COMM_RUNNING) {
        lane_close(l);
        return;
    }
    rc_error error;
    char name[LANE_NAME_BYTES] = "";
    error_clear(&error);
    if (l->path.here[0] != '\0') /* else it says nothing that rank, rail and lane do not */
        comm_name_lane(c, l, name, sizeof name);
    error_set(&error, l->error.code, "rank %d is lost: %s%s%s", l->peer, l->error.message,
              name[0] != '\0' ? ": " : "", name);
    error.rank = l->peer;
    error.sys_errno = l->error.sys_errno;
    if (error.code != RC_PROTOCOL) /* it can still tell the peer why */
        lane_close(l);
    comm_lose_lane(c, l, &error);
}

const lane_handler comm_lane_handler = {
    .begin = begin, .end = end, .sent = sent, .room = room, .dead = dead};

/* ---- what is sent ---- */

int comm_prepare_frame(peer_link *ln, out_frame *frame)
{
    rc_comm *c = ln->owner;
    uint32_t expected = frame->header.length;
    if (!work_env_encode(&c->env, frame)) {
        frame->next = ln->queue.head; /* comm_fail releases it with the others */
        ln->queue.head = frame;
        if (ln->queue.tail == NULL)
            ln->queue.tail = frame;
        comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory for a segment of %u bytes",
                       c->env.segment_bytes);
        return 0;
    }
    if (frame->header.type == FRAME_DATA)
        ln->sent -= expected - frame->header.length; /* what it has not taken of the credit */
    frame->header.consumed = ln->consumed;
    ln->consumed_told = ln->consumed;
    if (frame->header.type == FRAME_DATA)
        c->payload_bytes += frame->header.length;
    return 1;
}

/* Its deadline comes before the next heartbeats. */
static int is_hurried(const rc_comm *c, const rc_work *w)
{
    return !(w->flags & FRAME_P2P) && w->call.timeout_ms < 2 * c->config.heartbeat_ms;
}

void comm_announce_waiting(rc_comm *c, const rc_work *w)
{
    for (int rank = 0; is_hurried(c, w) && rank < c->env.world_size; rank++)
        if (c->env.links[rank] != NULL && c->state == COMM_RUNNING)
            comm_send_control(c, c->env.links[rank], FRAME_CALL, w->seq, w->fingerprint, w->flags,
                              -1);
}

/* Three reasons to announce: the peer may have to hold data back until it knows that we have called
 * (it has much to send, or is far ahead); a neighbour that gets no data from us could not find out
 * that we called something else, unless others tell it; and a deadline that passes before the next
 * heartbeats come must not be held against who has called. */
void comm_announce(rc_comm *c, const rc_work *w, const work_env *env)
{
    const plan *p = &w->plan;
    uint64_t segment = work_segment_bytes(w, p->segment_elems);
    uint64_t expected = w->receives_left * segment;
    int next = (p->rank + 1) % p->world_size;
    int hurried = is_hurried(c, w);
    for (int peer = 0; peer < p->world_size && c->state == COMM_RUNNING; peer++) {
        peer_link *ln = env->links[peer];
        if (ln == NULL)
            continue;
        int bulk = expected > ln->credit / 2 && plan_receives(p, peer) * segment > ln->credit / 2;
        int silent = peer == next && !(w->flags & FRAME_P2P) && !plan_meets_all(p) &&
                     !plan_starts_towards(p, peer);
        int ahead = is_far_ahead(ln) && plan_receives(p, peer) > 0;
        if (bulk || ahead || silent || hurried)
            comm_send_control(c, ln, FRAME_CALL, w->seq, w->fingerprint, w->flags, -1);
    }
}

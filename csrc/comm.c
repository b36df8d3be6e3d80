/* comm.c - life of a communicator, submission of works. See comm.h. */
#include "comm.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"

enum { BUFFERS_KEPT = 64, BYTES_KEPT = 32 << 20 };

/* ---- works ---- */

void comm_send_more(rc_comm *c, rc_work *w)
{
    if (c->state != COMM_RUNNING)
        return;
    if (work_send_more(w) != RC_OK)
        comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory for a frame");
    if (work_can_send_more(w))
        engine_pump_later(c->engine, &c->member);
    comm_finish_complete(c, w);
}

static rc_work *first_that(const rc_comm *c, int (*does)(const rc_work *w))
{
    const list_node *node = c->runnable.head;
    while (node != NULL && !does(LIST_ENTRY(node, rc_work, runnable)))
        node = node->next;
    return LIST_ENTRY(node, rc_work, runnable);
}

/* Advances shared memory, one work that sends bit by bit, and one copy: between two steps of a
 * work, others get their turn. */
static int pump_works(engine_member *member)
{
    rc_comm *c = (rc_comm *)member;
    int busy = comm_pump_shared(member);
    rc_work *w = first_that(c, work_can_send_more);
    if (w != NULL)
        comm_send_more(c, w);
    if ((w = first_that(c, keep_is_left)) != NULL) {
        keep_some(w);
        comm_finish_complete(c, w);
    }
    int more = w != NULL || first_that(c, work_can_send_more) != NULL;
    c->member.pumped |= more;
    return busy || more;
}

/* Returns 1 if the work needs calls of a peer that has left, which calls nothing any more. What it
 * sent before it left has come. */
static int needs(const rc_comm *c, const rc_work *w, const peer_link *ln)
{
    if (w->state == WORK_UNMATCHED)
        return comm_has_no_source(c, w);
    if (w->call.collective == RC_RECV)
        return w->call.root == ln->peer && w->receives_left > 0;
    if (w->flags & FRAME_P2P)
        return w->call.root == ln->peer;
    return w->seq >= ln->left_at;
}

static void check_work_left(rc_comm *c, const rc_work *w, const peer_link *ln)
{
    if (ln->goodbyes == ln->lane_count && needs(c, w, ln))
        comm_fail_text(c, RC_PEER_LOST, ln->peer, "rank %d has shut down without taking part in it",
                       ln->peer);
}

static void check_left_for(rc_comm *c, const rc_work *w)
{
    for (int rank = 0; rank < c->env.world_size; rank++)
        if (c->env.links[rank] != NULL)
            check_work_left(c, w, c->env.links[rank]);
}

void comm_check_left(rc_comm *c, const peer_link *ln)
{
    for (const rc_work *w = c->active_head; w != NULL; w = w->next)
        check_work_left(c, w, ln);
}

void comm_start_on_links(rc_comm *c, rc_work *w, work_env *env)
{
    rc_result result = comm_note_call(c, w);
    if (result == RC_OK)
        result = work_start(w, env);
    if (result != RC_OK) {
        comm_fail_text(c, result, c->env.rank, "a collective could not start: %s",
                       rc_result_name(result));
        return;
    }
    if (w->state == WORK_ON_LINKS && (w->quantised != NULL || keep_is_left(w)))
        list_append(&c->runnable, &w->runnable);
    comm_announce(c, w, env); /* also if the work is over: others' calls must still match */
    comm_unexpected_replay(c, w);
    if (w->call.collective == RC_RECV)
        check_work_left(c, w, c->env.links[w->call.root]);
    comm_finish_complete(c, w);
    if (work_can_send_more(w) || keep_is_left(w))
        engine_pump_later(c->engine, &c->member);
}

static void start_unmatched(rc_comm *c, rc_work *w)
{
    work_move(w, WORK_UNMATCHED);
    comm_match_receives(c, w->call.tag);
    if (w->state == WORK_UNMATCHED)
        check_left_for(c, w);
}

static void start_work(rc_comm *c, rc_work *w)
{
    if (c->state != COMM_RUNNING || c->leaving) {
        comm_end(c, w, c->error.code);
        return;
    }
    comm_active_add(c, w);
    engine_schedule(c->engine, &c->member, w->deadline);
    if (w->matched_later) {
        start_unmatched(c, w);
        return;
    }
    check_left_for(c, w);
    if (!comm_start_shared(c, w))
        comm_start_on_links(c, w, &c->env);
}

static void drain(engine_member *member)
{
    rc_comm *c = (rc_comm *)member;
    pthread_mutex_lock(&c->engine->inbox_lock);
    rc_work *list = c->inbox_head;
    c->inbox_head = c->inbox_tail = NULL;
    pthread_mutex_unlock(&c->engine->inbox_lock);
    while (list != NULL) {
        rc_work *w = list;
        list = w->next;
        start_work(c, w);
    }
}

static rc_result number(rc_comm *c, rc_work *w)
{
    if (w->flags & FRAME_P2P)
        return comm_number(c, w);
    w->seq = c->next_seq++;
    return RC_OK;
}

rc_result comm_submit(rc_comm *c, const rc_call *call, rc_work **out)
{
    rc_work *w = work_create(c->engine, call, c->config.spin_us);
    if (w == NULL)
        return RC_NO_MEMORY;
    if (call->feedback != NULL && !quantised_takes(call, c->env.world_size) &&
        work_add_residual(w, c->env.contributors) != RC_OK) {
        work_release(w);
        work_release(w);
        return RC_NO_MEMORY;
    }
    pthread_mutex_lock(&c->engine->inbox_lock);
    if (number(c, w) != RC_OK) {
        pthread_mutex_unlock(&c->engine->inbox_lock);
        work_release(w); /* the communicator's reference, and the caller's */
        work_release(w);
        return RC_NO_MEMORY;
    }
    w->next = NULL;
    if (c->inbox_tail != NULL)
        c->inbox_tail->next = w;
    else
        c->inbox_head = w;
    c->inbox_tail = w;
    *out = w;
    pthread_mutex_unlock(&c->engine->inbox_lock);
    engine_submit(c->engine, call->waits);
    return RC_OK;
}

/* ---- control frames ---- */

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

/* ---- life ---- */

static rc_result make_links(rc_comm *c)
{
    size_t n = (size_t)c->env.world_size;
    c->link_storage = calloc(n, sizeof *c->link_storage);
    c->env.links = calloc(n, sizeof *c->env.links);
    if (c->link_storage == NULL || c->env.links == NULL)
        return RC_NO_MEMORY;
    for (int rank = 0; rank < c->env.world_size; rank++) {
        peer_link *ln = &c->link_storage[rank];
        ln->peer = rank;
        ln->owner = c;
        ln->prepare = comm_prepare_frame;
        ln->credit =
            LINK_CREDIT_SEGMENTS * ((uint64_t)c->config.segment_bytes + FRAME_HEADER_BYTES);
        ln->left_at = UINT64_MAX;
        ln->lanes = calloc(LINK_MAX_LANES, sizeof(lane *));
        if (ln->lanes == NULL)
            return RC_NO_MEMORY;
        if (rank != c->env.rank)
            c->env.links[rank] = ln;
    }
    return RC_OK;
}

static void destroy_comm(rc_comm *c)
{
    for (int rank = 0; c->link_storage != NULL && rank < c->env.world_size; rank++) {
        peer_link *ln = &c->link_storage[rank];
        for (int i = 0; ln->lanes != NULL && i < ln->lane_count; i++)
            free(ln->lanes[i]);
        free(ln->lanes);
        held_destroy(&ln->held);
        keyed_destroy(&ln->early[0]);
        keyed_destroy(&ln->early[1]);
        keyed_destroy(&ln->receives);
        tags_destroy(&ln->receives_posted);
        tags_destroy(&ln->started);
        tags_destroy(&ln->numbers);
    }
    comm_unshare(c);
    keyed_destroy(&c->collectives);
    keyed_destroy(&c->unmatched);
    free(c->link_storage);
    free(c->env.links);
    work_env_destroy(&c->env);
    free(c);
}

rc_result comm_create(rc_comm **out, rc_engine *engine, const rc_comm_config *config)
{
    rc_comm *c = calloc(1, sizeof *c);
    if (c == NULL)
        return RC_NO_MEMORY;
    c->engine = engine;
    c->config = *config;
    c->member = (engine_member){.drain = drain,
                                .tick = comm_tick,
                                .pump = pump_works,
                                .can_advance = comm_shared_can_advance,
                                .set_wakeup_wanted = comm_shared_set_wakeup_wanted,
                                .settle = comm_settle};
    c->env = (work_env){.engine = engine,
                        .rank = config->rank,
                        .world_size = config->world_size,
                        .contributors = config->world_size,
                        .buffers = &c->buffers,
                        .frames = &c->frames,
                        .epoch = config->epoch,
                        .segment_bytes = config->segment_bytes,
                        .one_host = config->one_host,
                        .algorithm = config->algorithm,
                        .link_mbit = config->link_mbit};
    c->shared = (shared_memory){.history = c->history, .history_length = COMM_HISTORY};
    uint32_t kept = BYTES_KEPT / config->segment_bytes;
    pool_init(&c->buffers, config->segment_bytes, kept < BUFFERS_KEPT ? (int)kept : BUFFERS_KEPT);
    c->ports.source.fd = -1;
    error_clear(&c->error);
    if (make_links(c) != RC_OK) {
        destroy_comm(c);
        return RC_NO_MEMORY;
    }
    engine_lock(engine);
    engine_join(engine, &c->member);
    engine_unlock(engine);
    *out = c;
    return RC_OK;
}

static rc_result open_lane(rc_comm *c, const peer_link *ln, lane *l)
{
    RC_TRY(lane_open(l, l->source.fd, c->config.segment_bytes, c->config.epoch));
    l->sender = c->sender;
    if (ln->lane_count > 1)
        lane_stripe(l);
    return RC_OK;
}

rc_result comm_start(rc_comm *c)
{
    rc_result result = RC_OK;
    engine_lock(c->engine);
    comm_move(c, COMM_RUNNING);
    c->engine->oversubscribed |= c->config.oversubscribed;
    c->last_tick = clock_ns();
    if (c->config.threads > 1)
        c->sender = sender_get(c->engine); /* without it the engine's thread sends, slower */
    for (int rank = 0; rank < c->env.world_size; rank++) {
        peer_link *ln = c->env.links[rank];
        for (int i = 0; ln != NULL && i < ln->lane_count; i++)
            if (open_lane(c, ln, ln->lanes[i]) != RC_OK)
                result = RC_SYSTEM;
    }
    comm_open_ports(c);
    engine_schedule(c->engine, &c->member, clock_ns() + comm_tick_interval(c));
    if (result != RC_OK) {
        comm_check_closed(c);
        comm_fail_text(c, result, -1, "a lane's descriptor is not a usable socket");
    }
    engine_unlock(c->engine);
    return result;
}

void comm_abort(rc_comm *c, const char *reason)
{
    engine_lock(c->engine);
    comm_fail_text(c, RC_ABORTED, c->env.rank, "rank %d aborted: %s", c->env.rank, reason);
    engine_unlock(c->engine);
}

/* Returns 1 if all data sent has reached the peers' hosts. */
static int is_flushed(const void *arg)
{
    const rc_comm *c = arg;
    for (int rank = 0; rank < c->env.world_size; rank++) {
        const peer_link *ln = c->env.links[rank];
        for (int i = 0; ln != NULL && i < ln->lane_count; i++)
            if (ln->lanes[i]->source.fd >= 0 && !comm_lane_may_be_dead(c, ln->lanes[i]) &&
                lane_unacked(ln->lanes[i]) > 0)
                return 0;
    }
    return 1;
}

static void say_goodbye(rc_comm *c)
{
    error_set(&c->error, RC_INVALID_STATE, "the communicator is closed");
    comm_send_on_all_lanes(c, FRAME_GOODBYE, c->called);
    c->leaving = 1;
}

static void close_comm(rc_comm *c)
{
    if (c->state == COMM_CLOSED)
        return;
    for (int rank = 0; rank < c->env.world_size; rank++) {
        peer_link *ln = &c->link_storage[rank];
        for (int i = 0; i < ln->lane_count; i++)
            if (c->state == COMM_NEW) {
                close(ln->lanes[i]->source.fd);
            } else {
                comm_drop_half_received(c, ln->lanes[i]);
                lane_close(ln->lanes[i]);
            }
    }
    comm_close_ports(c);
    comm_move(c, COMM_CLOSED);
}

/* Leaves the group. Returns RC_OK once all data sent has reached the peers' hosts, else RC_AGAIN.
 * Under the lock. */
static rc_result leave_group(rc_comm *c, int timeout_ms)
{
    enum { LOOK_EVERY_MS = 1 };
    drain(&c->member);
    if (c->active_head != NULL)
        comm_fail_text(c, RC_ABORTED, c->env.rank,
                       "rank %d closed its communicator with collectives in flight", c->env.rank);
    if (c->state == COMM_RUNNING && !c->leaving)
        say_goodbye(c);
    engine_settle(c->engine);
    uint64_t now = clock_ns(), deadline = now + (uint64_t)timeout_ms * CLOCK_MS;
    while (c->state != COMM_NEW && !is_flushed(c) && now < deadline) {
        engine_drive(c->engine, is_flushed, c, now + LOOK_EVERY_MS * CLOCK_MS, 0);
        now = clock_ns();
    }
    return c->state == COMM_NEW || is_flushed(c) ? RC_OK : RC_AGAIN;
}

rc_result comm_leave(rc_comm *c, int timeout_ms)
{
    engine_lock(c->engine);
    rc_result result = leave_group(c, timeout_ms);
    engine_unlock(c->engine);
    return result;
}

rc_result comm_close(rc_comm *c, int timeout_ms)
{
    engine_lock(c->engine);
    rc_result result = leave_group(c, timeout_ms);
    comm_unexpected_drop(c);
    close_comm(c);
    engine_unlock(c->engine);
    return result == RC_AGAIN ? RC_TIMEOUT : result;
}

void comm_free(rc_comm *c)
{
    engine_lock(c->engine);
    comm_fail_text(c, RC_ABORTED, c->env.rank, "rank %d freed its communicator", c->env.rank);
    engine_settle(c->engine);
    close_comm(c);
    drain(&c->member);
    engine_settle(c->engine);
    engine_leave(c->engine, &c->member);
    engine_quiesce(c->engine);
    engine_unlock(c->engine);
    destroy_comm(c);
}

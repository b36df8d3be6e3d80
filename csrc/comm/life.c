/* life.c - the life of a communicator, from its lanes to the goodbye. See inside.h. */
#include <stdlib.h>
#include <unistd.h>

#include "../base/clock.h"
#include "../base/error.h"
#include "inside.h"

enum { BUFFERS_KEPT = 64, BYTES_KEPT = 32 << 20 };

/* ---- making one ---- */

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
        tags_destroy(&ln->sends_held);
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
    c->member = (engine_member){.drain = comm_drain,
                                .tick = comm_tick,
                                .pump = comm_pump,
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

rc_result comm_add_lane(rc_comm *c, int peer, int rail, int fd, double bytes_per_s)
{
    lane *l = calloc(1, sizeof *l);
    peer_link *ln = &c->link_storage[peer];
    if (l == NULL || ln->lane_count == LINK_MAX_LANES) {
        free(l);
        close(fd);
        return l == NULL ? RC_NO_MEMORY : RC_INVALID_ARGUMENT;
    }
    l->engine = c->engine;
    l->handler = &comm_lane_handler;
    l->link = ln;
    l->rail = rail;
    l->index = ln->lane_count;
    l->made = 1;
    l->peer = peer;
    l->rate = bytes_per_s * 1e-9;
    l->source.fd = fd;
    l->source.events = 0;
    ln->lanes[ln->lane_count++] = l;
    return RC_OK;
}

void comm_name_rail(rc_comm *c, int peer, int rail, const lane_path *path)
{
    const peer_link *ln = &c->link_storage[peer];
    for (int i = 0; i < ln->lane_count; i++)
        if (ln->lanes[i]->rail == rail)
            ln->lanes[i]->path = *path;
}

rc_engine *comm_engine(const rc_comm *c)
{
    return c->engine;
}

int comm_rank(const rc_comm *c)
{
    return c->env.rank;
}

int comm_world_size(const rc_comm *c)
{
    return c->env.world_size;
}

int comm_contributors(const rc_comm *c)
{
    return c->env.contributors;
}

int comm_hosts(const rc_comm *c)
{
    return c->shared.hosts;
}

uint64_t comm_spin(const rc_comm *c)
{
    return c->config.spin_us * CLOCK_US;
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
            if (comm_open_lane(c, ln->lanes[i], ln->lanes[i]->source.fd) != RC_OK)
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

/* ---- leaving ---- */

void comm_abort(rc_comm *c, const char *reason)
{
    engine_lock(c->engine);
    comm_fail_text(c, RC_ABORTED, c->env.rank, "rank %d aborted: %s", c->env.rank, reason);
    engine_unlock(c->engine);
}

/* Returns 1 if all data sent has reached the peers' hosts. What is behind a probe is not waited for
 * where a sibling has brought all: there it is the goodbye alone, which each of them brings. */
static int is_flushed(const void *arg)
{
    const rc_comm *c = arg;
    for (int rank = 0; rank < c->env.world_size; rank++) {
        const peer_link *ln = c->env.links[rank];
        int is_told = 0, is_probed = 0;
        for (int i = 0; ln != NULL && i < ln->lane_count; i++) {
            const lane *l = ln->lanes[i];
            if (l->source.fd < 0 || comm_lane_may_be_dead(c, l))
                continue;
            if (lane_unacked(l) == 0)
                is_told = 1;
            else if (lane_is_probed(l))
                is_probed = 1;
            else
                return 0;
        }
        if (is_probed && !is_told)
            return 0;
    }
    return 1;
}

/* Returns 1 unless all lanes that could take a goodbye are lost, or break. Of a lane that was made
 * anew nothing may have come yet: then the peer may never take it over. */
static int takes_goodbye(const peer_link *ln)
{
    int may_later = 0;
    for (int i = 0; i < ln->lane_count; i++) {
        const lane *l = ln->lanes[i];
        if (lane_takes(l) && (l->made == 1 || lane_received(l) > 0))
            return 1;
        may_later |= l->keeps;
    }
    return !may_later;
}

/* Says goodbye to the peers to which all has come that they need; the others are asked once. With
 * `all` they get it, too. */
static void say_goodbye(rc_comm *c, int all)
{
    int owes = 0;
    if (c->state != COMM_RUNNING)
        return;
    if (!c->leaving)
        error_set(&c->error, RC_INVALID_STATE, "the communicator is closed");
    c->leaving = 1;
    for (int rank = 0; rank < c->env.world_size; rank++) {
        peer_link *ln = c->env.links[rank];
        if (ln == NULL || ln->is_told)
            continue;
        ln->is_owed = comm_owes(ln);
        owes |= ln->is_owed;
        if (all || link_is_left(ln) || (!ln->is_owed && takes_goodbye(ln))) {
            comm_send_on_all_lanes(c, ln, FRAME_GOODBYE, c->called);
            ln->is_told = 1;
        }
    }
    if (owes && !c->has_asked) {
        c->has_asked = 1;
        comm_ask(c);
    }
}

static int has_left(const void *arg)
{
    const rc_comm *c = arg;
    for (int rank = 0; rank < c->env.world_size; rank++)
        if (c->env.links[rank] != NULL && !c->env.links[rank]->is_told)
            return 0;
    return is_flushed(c);
}

static void close_comm(rc_comm *c)
{
    if (c->state == COMM_CLOSED)
        return;
    for (int rank = 0; rank < c->env.world_size; rank++) {
        peer_link *ln = &c->link_storage[rank];
        ln->is_told = 1;
        for (out_frame *frame; (frame = queue_pop(&ln->queue)) != NULL;)
            work_env_release(&c->env, frame); /* it was to go out again */
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
    comm_drain(&c->member);
    if (c->active.head != NULL)
        comm_fail_text(c, RC_ABORTED, c->env.rank,
                       "rank %d closed its communicator with collectives in flight", c->env.rank);
    engine_settle(c->engine);
    uint64_t now = clock_ns(), deadline = now + (uint64_t)timeout_ms * CLOCK_MS;
    say_goodbye(c, 0);
    while (c->state != COMM_NEW && !has_left(c) && now < deadline) {
        engine_drive(c->engine, has_left, c, now + LOOK_EVERY_MS * CLOCK_MS, 0);
        say_goodbye(c, 0);
        now = clock_ns();
    }
    return c->state == COMM_NEW || has_left(c) ? RC_OK : RC_AGAIN;
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
    say_goodbye(c, 1);
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
    comm_drain(&c->member);
    engine_settle(c->engine);
    engine_leave(c->engine, &c->member);
    engine_quiesce(c->engine);
    engine_unlock(c->engine);
    destroy_comm(c);
}

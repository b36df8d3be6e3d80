/* api_lanes.c - the public functions that give a communicator its lanes and ports, and read its
 * counters. The rules are those of api.c.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "comm/comm.h"

static int is_forked(const rc_engine *engine)
{
    return atomic_load(&engine->forked);
}

/* ---- lanes and ports ---- */

rc_result rc_comm_add_lane(rc_comm *comm, int peer, int rail, int fd, double bytes_per_s)
{
    int ok = comm != NULL && comm->state == COMM_NEW && peer >= 0 && peer < comm->env.world_size &&
             peer != comm->env.rank && rail >= 0 && bytes_per_s >= 0.0;
    if (ok && fd >= 0)
        return comm_add_lane(comm, peer, rail, fd, bytes_per_s);
    if (fd >= 0)
        close(fd);
    return RC_INVALID_ARGUMENT;
}

rc_result rc_comm_name_rail(rc_comm *comm, int peer, int rail, int port, const char *here,
                            const char *there)
{
    if (comm == NULL || comm->state != COMM_NEW || peer < 0 || peer >= comm->env.world_size ||
        peer == comm->env.rank || port < 0)
        return RC_INVALID_ARGUMENT;
    lane_path path = {.port = port};
    snprintf(path.here, sizeof path.here, "%s", here != NULL ? here : "");
    snprintf(path.there, sizeof path.there, "%s", there != NULL ? there : "");
    comm_name_rail(comm, peer, rail, &path);
    return RC_OK;
}

rc_result rc_comm_watch_ports(rc_comm *comm, int fd)
{
    if (fd >= 0 && comm != NULL && comm->state == COMM_NEW && comm->ports.source.fd < 0) {
        comm_watch_ports(comm, fd);
        return RC_OK;
    }
    if (fd >= 0)
        close(fd);
    return RC_INVALID_ARGUMENT;
}

static int is_lane(const rc_comm *comm, int peer, int lane)
{
    return comm != NULL && !is_forked(comm->engine) && peer >= 0 && peer < comm->env.world_size &&
           peer != comm->env.rank && lane >= 0 && lane < comm->link_storage[peer].lane_count;
}

rc_result rc_comm_drop_lane(rc_comm *comm, int peer, int lane, rc_lane_mark *out)
{
    if (!is_lane(comm, peer, lane) || out == NULL)
        return RC_INVALID_ARGUMENT;
    engine_lock(comm->engine);
    rc_result result = comm_drop_lane(comm, peer, lane, out);
    engine_unlock(comm->engine);
    return result;
}

rc_result rc_comm_lose_peer(rc_comm *comm, int peer)
{
    if (!is_lane(comm, peer, 0))
        return RC_INVALID_ARGUMENT;
    engine_lock(comm->engine);
    rc_result result = comm_lose_peer(comm, peer);
    engine_unlock(comm->engine);
    return result;
}

rc_result rc_comm_renew_lane(rc_comm *comm, int peer, int lane, int fd, const rc_lane_mark *ours,
                             const rc_lane_mark *theirs)
{
    if (!is_lane(comm, peer, lane) || fd < 0 || ours == NULL || theirs == NULL) {
        if (fd >= 0)
            close(fd);
        return RC_INVALID_ARGUMENT;
    }
    engine_lock(comm->engine);
    rc_result result = comm_renew_lane(comm, peer, lane, fd, ours, theirs);
    engine_unlock(comm->engine);
    return result;
}

/* ---- counters ---- */

void rc_comm_stats_get(rc_comm *comm, rc_comm_stats *out)
{
    memset(out, 0, sizeof *out);
    if (is_forked(comm->engine))
        return;
    engine_lock(comm->engine);
    out->works = comm->works_done;
    out->payload_bytes = comm->payload_bytes + comm->shared.bytes;
    out->shared_bytes = comm->shared.bytes;
    for (int rank = 0; rank < comm->env.world_size; rank++) {
        const peer_link *ln = &comm->link_storage[rank];
        out->lanes += ln->lane_count;
        for (int i = 0; i < ln->lane_count; i++)
            out->wire_bytes += ln->lanes[i]->out.sent_bytes;
    }
    out->threads = comm->sender != NULL ? 2 : 1;
    out->engine_cpu_s = engine_cpu_seconds(comm->engine);
    out->waiting_s = clock_seconds(0, comm->engine->waited);
    engine_unlock(comm->engine);
}

static rc_lane_stats lane_stats(const lane *l)
{
    rc_lane_stats stats = {.peer = l->peer,
                           .rail = l->rail,
                           .lane = l->index,
                           .sent_bytes = l->out.sent_bytes,
                           .received_bytes = l->received_bytes,
                           .sent_frames = l->sent_frames,
                           .received_frames = l->received_frames,
                           .rate = l->rate * 1e9,
                           .made = l->made,
                           .is_lost = l->state == LANE_LOST};
    lane_ask_tcp(l, &stats.retransmits, &stats.rtt_s);
    return stats;
}

int rc_comm_lane_stats(rc_comm *comm, rc_lane_stats *out, int capacity)
{
    int count = 0;
    if (is_forked(comm->engine))
        return 0;
    engine_lock(comm->engine);
    for (int rank = 0; rank < comm->env.world_size; rank++) {
        const peer_link *ln = &comm->link_storage[rank];
        for (int i = 0; i < ln->lane_count; i++, count++)
            if (count < capacity)
                out[count] = lane_stats(ln->lanes[i]);
    }
    engine_unlock(comm->engine);
    return count;
}

int rc_comm_lost_lanes(rc_comm *comm, rc_lost_lane *out, int capacity)
{
    int count = 0;
    if (is_forked(comm->engine))
        return 0;
    engine_lock(comm->engine);
    int has_failed = comm->error.code != RC_OK && !comm->leaving;
    for (int rank = 0; rank < comm->env.world_size; rank++) {
        const peer_link *ln = &comm->link_storage[rank];
        for (int i = 0; i < ln->lane_count; i++) {
            const lane *l = ln->lanes[i];
            int is_silent = comm_may_have_lost(comm, l);
            if (l->state != LANE_LOST && !is_silent)
                continue;
            if (count < capacity)
                out[count] = (rc_lost_lane){rank, i, is_silent, l->error};
            count++;
        }
    }
    engine_unlock(comm->engine);
    return has_failed ? -1 : count;
}

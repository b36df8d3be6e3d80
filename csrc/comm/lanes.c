/* lanes.c - the check that each lane and each peer lives: heartbeats and silence. See inside.h.
 *
 * A peer from which nothing comes on any lane is lost as a whole: its process is stopped, or its
 * host or network is down. Each lane is judged by itself as well, only by time in which its peer
 * showed that it lives: the pause of a stopped or slow process is not held against a cable.
 *
 *   silent   nothing came on the lane while something came on others
 *   stuck    something is in flight on it, and no acknowledgement moved meanwhile: what is sent
 *            does not get through, though what the peer sends may
 *   crawls   of what was in flight so little was acknowledged that another lane would be faster by
 *            far. No error; but a lane that can be given up is, and made anew
 *   cut      the kernel says that its port here is lost (port_watch.c)
 *
 * Invariant. After a pause of the peer, or of this process, a lane has a heartbeat's time to show
 * that it lives, too.
 */
#include <math.h>
#include <stdio.h>

#include "../base/clock.h"
#include "../base/error.h"
#include "inside.h"

enum {
    RECENT_S = 10, /* span of "lately" in reports: so many seconds, or half */
    /* A lane is dark after this time at the earliest. TCP sends a lost packet again after 0.2, 0.6
     * and 1.4 s: a lane that loses three in a row is congested. */
    LEAST_DARK_MS = 1500,
    CRAWL_MS = 300, /* for which a lane is slow until it is given up; and what that is to save */
    DOUBT_BEATS = 3 /* heartbeats that a lane misses before it is in doubt */
};

uint64_t comm_tick_interval(const rc_comm *c)
{
    enum { RECOVERS_MS = 200 }; /* a work may wait for what is on a lane that is dark */
    uint64_t half = c->config.heartbeat_ms * CLOCK_MS / 2;
    return c->config.recovers && half > RECOVERS_MS * CLOCK_MS ? RECOVERS_MS * CLOCK_MS : half;
}

/* ---- names ---- */

const char *comm_name_lane(const rc_comm *c, const lane *l, char *text, size_t size)
{
    if (l->path.here[0] == '\0' || l->path.there[0] == '\0')
        snprintf(text, size, "rail %d between rank %d and rank %d", l->rail, c->env.rank, l->peer);
    else
        snprintf(text, size, "rail %d between rank %d (%s) and rank %d (%s)", l->rail, c->env.rank,
                 l->path.here, l->peer, l->path.there);
    return text;
}

static const char *bytes_text(uint64_t bytes, char text[16])
{
    if (bytes < 10000)
        snprintf(text, 16, "%u B", (unsigned)bytes);
    else if (bytes < 10000000)
        snprintf(text, 16, "%.3g kB", (double)bytes * 1e-3);
    else
        snprintf(text, 16, "%.3g MB", (double)bytes * 1e-6);
    return text;
}

/* ---- what becomes of a lane ---- */

void comm_lose_lane(rc_comm *c, lane *l, rc_error *why)
{
    why->rail = l->rail;
    why->lane = l->index;
    if (comm_give_up_lane(c, l)) {
        l->error = *why;
        return;
    }
    l->health.lost = why->code != RC_PROTOCOL; /* what arrives damaged may be answered */
    comm_fail(c, why);
}

void comm_blame_lane(const rc_comm *c, const lane *l, rc_error *error)
{
    char name[LANE_NAME_BYTES] = "";
    error_clear(error);
    if (l->path.here[0] != '\0') /* else it says nothing that rank, rail and lane do not */
        comm_name_lane(c, l, name, sizeof name);
    const char *before_name = name[0] != '\0' ? ": " : "";
    if (l->error.code == RC_PROTOCOL)
        error_set(error, RC_PROTOCOL, "on lane %d of rail %d from rank %d to rank %d %s%s%s",
                  l->index, l->rail, l->peer, c->env.rank, l->error.message, before_name, name);
    else if (l->keeps) /* then the peer is not lost with it */
        error_set(error, l->error.code, "%s broke: %s", comm_name_lane(c, l, name, sizeof name),
                  l->error.message);
    else
        error_set(error, l->error.code, "rank %d is lost: %s%s%s", l->peer, l->error.message,
                  before_name, name);
    error->rank = l->peer;
    error->sys_errno = l->error.sys_errno;
}

static lane *find_closed(const rc_comm *c)
{
    for (int rank = 0; rank < c->env.world_size; rank++) {
        const peer_link *ln = c->env.links[rank];
        for (int i = 0; ln != NULL && i < ln->lane_count; i++)
            if (ln->lanes[i]->source.fd >= 0 && !engine_is_own(&ln->lanes[i]->source))
                return ln->lanes[i];
    }
    return NULL;
}

void comm_check_closed(rc_comm *c)
{
    char which[120] = "those that it waits with";
    rc_error why;
    if (c->state != COMM_RUNNING)
        return;
    const lane *l = find_closed(c);
    if (l == NULL && engine_is_whole(c->engine))
        return;
    if (l != NULL)
        snprintf(which, sizeof which, "%d, the socket of lane %d of rail %d to rank %d",
                 l->source.fd, l->index, l->rail, l->peer);
    error_clear(&why);
    error_set(&why, RC_SYSTEM,
              "another part of this process closed descriptors of ringcomm on rank %d: %s "
              "(os.closerange, closefrom, or a close too many)",
              c->env.rank, which);
    why.rank = c->env.rank;
    if (l != NULL) {
        why.rail = l->rail;
        why.lane = l->index;
    }
    comm_fail(c, &why);
}

/* ---- how lanes fare ---- */

/* Measures the pace at which what is in flight is acknowledged, from one check to another, at least
 * CRAWL_MS later. It is known only if less than what was in flight at first was acknowledged: else
 * there may just have been nothing to send; and not of a time in which this process may have slept.
 */
static void measure_pace(lane *l, uint64_t acked, int in_flight, uint64_t now)
{
    lane_health *h = &l->health;
    uint64_t time = now - h->paced_since;
    if (in_flight && h->paced_since != 0 && time < CRAWL_MS * CLOCK_MS)
        return;
    int is_known = in_flight && time < 3 * CRAWL_MS * CLOCK_MS && acked > h->paced_acked &&
                   acked - h->paced_acked < h->paced_left;
    h->pace = is_known ? (double)(acked - h->paced_acked) / (double)time : 0.0;
    h->paced_since = in_flight ? now : 0;
    h->paced_acked = acked;
    h->paced_left = in_flight ? lane_unacked(l) : 0;
}

/* Notes a lane's progress since the last check. lived: the part of that time in which the peer
 * showed that it lives. */
static void look_at(lane *l, uint64_t lived, uint64_t now)
{
    lane_health *h = &l->health;
    int in_flight;
    uint64_t acked = lane_acked(l, &in_flight);
    if (l->keeps)
        measure_pace(l, acked, in_flight, now);
    h->silent = l->last_rx != h->heard ? 0 : h->silent + lived;
    if (!in_flight || acked != h->acked || h->moved == 0)
        h->moved = now;
    h->stuck = h->stuck + lived < now - h->moved ? h->stuck + lived : now - h->moved;
    h->heard = l->last_rx;
    h->acked = acked;
    if (h->times[1] != 0 && now - h->times[1] < RECENT_S * CLOCK_S / 2)
        return;
    h->marks[0] = h->marks[1];
    h->times[0] = h->times[1] != 0 ? h->times[1] : now;
    h->marks[1] = acked;
    h->times[1] = now;
}

static uint64_t last_sign(const peer_link *ln)
{
    uint64_t last = 0;
    for (int i = 0; i < ln->lane_count; i++)
        if (ln->lanes[i]->last_rx > last)
            last = ln->lanes[i]->last_rx;
    return last;
}

/* Notes the progress of all lanes. The time between two signs of life counts, but no more than a
 * running peer lets pass. */
static void look_at_lanes(const rc_comm *c, peer_link *ln, uint64_t now)
{
    uint64_t most = 2 * c->config.heartbeat_ms * CLOCK_MS;
    uint64_t sign = last_sign(ln), lived = 0;
    if (ln->last_alive_ns != 0 && sign > ln->last_alive_ns)
        lived = sign - ln->last_alive_ns;
    if (ln->last_alive_ns == 0 || lived > most)
        ln->alive_since_ns = sign;
    for (int i = 0; i < ln->lane_count; i++)
        look_at(ln->lanes[i], lived < most ? lived : most, now);
    if (sign > ln->last_alive_ns)
        ln->last_alive_ns = sign;
}

/* Writes ", in the midst of a frame (10 of 4096 bytes)", or "". */
static const char *midst_text(const lane *l, char text[80])
{
    text[0] = '\0';
    if (l->in_payload)
        snprintf(text, 80, ", in the midst of a frame (%u of %u bytes)", l->rx_have, l->rx.length);
    return text;
}

/* Returns the time (ns) of silence, or without acknowledgements, after which a lane is dark. */
static uint64_t dark_after(const rc_comm *c)
{
    uint32_t ms = c->config.peer_timeout_ms;
    return (ms > LEAST_DARK_MS ? ms : LEAST_DARK_MS) * CLOCK_MS;
}

/* Returns 1 if a lane is dark, and writes which signs it lacks. One that can be given up is not
 * waited for that long: a mistake costs little, as its frames go out again. */
static int is_dark(const rc_comm *c, const lane *l, int *silent, int *stuck)
{
    enum { STUCK_MS = 700 };
    uint64_t silent_after = dark_after(c), stuck_after = silent_after;
    uint64_t beats_ms = DOUBT_BEATS * (uint64_t)c->config.heartbeat_ms;
    if (comm_can_give_up(l) && comm_has_another(l)) {
        silent_after = (beats_ms > LEAST_DARK_MS ? beats_ms : LEAST_DARK_MS) * CLOCK_MS;
        stuck_after = STUCK_MS * CLOCK_MS;
    }
    *silent = l->health.silent > silent_after;
    *stuck = l->health.stuck > stuck_after;
    return *silent || *stuck;
}

int comm_lane_may_be_dead(const rc_comm *c, const lane *l)
{
    const lane_health *h = &l->health;
    uint64_t doubt = dark_after(c) / 2;
    return h->lost || h->port_lost != 0 || h->silent > doubt || h->stuck > doubt;
}

/* Returns 1 if this lane's port has lanes to other ranks and all are as silent: then the port here
 * is dark, or the device it is plugged into. */
static int is_whole_port(const rc_comm *c, const lane *l)
{
    int others = 0;
    for (int rank = 0; rank < c->env.world_size && l->path.port != 0; rank++) {
        const peer_link *ln = c->env.links[rank];
        for (int i = 0; ln != NULL && rank != l->peer && i < ln->lane_count; i++) {
            const lane *other = ln->lanes[i];
            if (other->path.port != l->path.port || !comm_monitors_lane(other))
                continue;
            if (other->health.silent <= dark_after(c) / 2)
                return 0;
            others++;
        }
    }
    return others > 0;
}

int comm_may_have_lost(const rc_comm *c, const lane *l)
{
    const peer_link *ln = l->link;
    uint64_t now = clock_ns(), last = last_sign(ln);
    uint64_t beat = c->config.heartbeat_ms * CLOCK_MS, doubt = DOUBT_BEATS * beat;
    uint64_t half = c->config.peer_timeout_ms * CLOCK_MS / 2; /* a connection takes a while, too */
    int has_slept = now > c->last_tick + 2 * comm_tick_interval(c);
    if (doubt > half)
        doubt = half > beat * 3 / 2 ? half : beat * 3 / 2;
    return l->keeps && l->state == LANE_OPEN && !ln->is_told && ln->goodbyes == 0 && !has_slept &&
           now > last + doubt;
}

/* Returns the time (ns) in which one of the link's other lanes would carry so many bytes, too. */
static double time_beside(const lane *l, double bytes)
{
    const peer_link *ln = l->link;
    double least = HUGE_VAL;
    for (int i = 0; i < ln->lane_count; i++) {
        const lane *other = ln->lanes[i];
        int is_well = comm_monitors_lane(other) && lane_takes(other) && other->rate > 0.0 &&
                      other->health.stuck == 0 && other->health.pace == 0.0;
        if (other == l || !is_well)
            continue;
        double time = (bytes + (double)lane_unacked(other)) / other->rate;
        least = time < least ? time : least;
    }
    return least;
}

/* Returns 1 if what is in flight would be there sooner by far by another lane, though sent anew, by
 * a pace that has just been measured. */
static int is_crawling(const lane *l, uint64_t now)
{
    enum { GAIN = 2 };
    const lane_health *h = &l->health;
    if (h->pace == 0.0 || h->paced_since != now || h->moved != now ||
        lane_is_probed(l)) /* a probe may take its time */
        return 0;
    double left = (double)lane_unacked(l), saved = left / h->pace - CRAWL_MS * (double)CLOCK_MS;
    return saved > 0.0 && saved > GAIN * time_beside(l, left);
}

/* Gives up a lane that crawls. Made anew it is known to be slow, and gets little, but enough to
 * find out when it is not any more. */
static void give_up_crawling(rc_comm *c, lane *l)
{
    enum { MOST_SLOWER = 50 };
    char name[LANE_NAME_BYTES], amount[16];
    rc_error why;
    double pace = l->health.pace, least = l->rate / MOST_SLOWER;
    l->rate = pace > least ? pace : least;
    error_clear(&why);
    error_set(&why, RC_PEER_LOST, "%s is slow: %s on their way there go by another lane",
              comm_name_lane(c, l, name, sizeof name), bytes_text(lane_unacked(l), amount));
    why.rank = l->peer;
    comm_lose_lane(c, l, &why);
}

static void judge_lane(rc_comm *c, lane *l, uint64_t now)
{
    const lane_health *h = &l->health;
    int silent, stuck;
    char name[LANE_NAME_BYTES], in[160] = "", out[96] = "", amount[16], midst[80];
    rc_error why;
    if (!comm_monitors_lane(l))
        return;
    if (is_crawling(l, now) && comm_can_give_up(l) && comm_has_another(l)) {
        give_up_crawling(c, l);
        return;
    }
    if (!is_dark(c, l, &silent, &stuck))
        return;
    if (silent)
        snprintf(in, sizeof in, "nothing came from rank %d for %.1f s%s", l->peer,
                 clock_seconds(l->last_rx, now), midst_text(l, midst));
    if (stuck || (h->stuck > 0 && silent))
        snprintf(out, sizeof out, "%snone of %s on their way there was acknowledged for %.1f s",
                 silent ? ", and " : "", bytes_text(lane_unacked(l), amount),
                 (double)h->stuck * 1e-9);
    int whole_port = is_whole_port(c, l);
    error_clear(&why);
    error_set(&why, RC_PEER_LOST, "%s is dark: %s%s, while rank %d lives. %s",
              comm_name_lane(c, l, name, sizeof name), in, out, l->peer,
              whole_port
                  ? "So are the lanes of this port to all other ranks: look at its cable, "
                    "switch port, address and firewall"
                  : "Look at both ports' cables, switch ports, addresses, MTUs and firewalls");
    why.rank = whole_port ? c->env.rank : l->peer;
    comm_lose_lane(c, l, &why);
}

static void judge_lanes(rc_comm *c, const peer_link *ln, uint64_t now)
{
    if (now < ln->alive_since_ns + c->config.heartbeat_ms * CLOCK_MS)
        return;
    for (int i = 0; i < ln->lane_count; i++)
        judge_lane(c, ln->lanes[i], now);
}

/* ---- how peers fare ---- */

/* Returns 1 if a lane of the link is stuck, which is judged by signs of life on the others. */
static int wants_signs(const peer_link *ln)
{
    for (int i = 0; i < ln->lane_count; i++)
        if (ln->lanes[i]->keeps && comm_monitors_lane(ln->lanes[i]) &&
            ln->lanes[i]->health.stuck > 0)
            return 1;
    return 0;
}

static void beat(rc_comm *c, peer_link *ln, uint64_t now)
{
    comm_announce_again(c, ln);
    comm_tell_lost_lanes(c, ln);
    int asks = wants_signs(ln);
    for (int i = 0; i < ln->lane_count; i++) {
        lane *l = ln->lanes[i];
        if (asks && comm_monitors_lane(l) && l->health.stuck == 0)
            comm_send_control(c, ln, FRAME_HEARTBEAT, c->called, 0, FRAME_ASKS, i);
        if (now - l->last_rx >= comm_tick_interval(c))
            lane_stir(l);
        if (!c->leaving)
            comm_probe(c, l);
        int is_left = atomic_load(&l->out.sent_bytes) >= l->beat_end; /* the last heartbeat */
        if (l->state == LANE_OPEN && is_left &&
            now - l->out.last_tx >= c->config.heartbeat_ms * CLOCK_MS &&
            comm_send_control(c, ln, FRAME_HEARTBEAT, c->called, 0, 0, i))
            l->beat_end = l->pushed;
    }
}

/* Restarts the silence of all lanes: time in which this process itself did not run says nothing
 * about its peers. */
static void forgive(rc_comm *c, uint64_t now)
{
    for (int rank = 0; rank < c->env.world_size; rank++) {
        peer_link *ln = c->env.links[rank];
        for (int i = 0; ln != NULL && i < ln->lane_count; i++)
            ln->lanes[i]->last_rx = now;
    }
}

static void fail_silent(rc_comm *c, const peer_link *ln, const lane *lost, uint64_t silence)
{
    char midst[80];
    int is_known = lost != NULL && lost->error.code != RC_OK;
    comm_fail_text(c, RC_PEER_LOST, is_known ? lost->error.rank : ln->peer,
                   "rank %d has given no sign of life for %.1f s%s: %s", ln->peer,
                   (double)silence * 1e-9, midst_text(ln->lanes[0], midst),
                   is_known ? lost->error.message
                            : "its process is stopped, or its host or network is down");
}

static void check_peer(rc_comm *c, peer_link *ln, uint64_t now)
{
    uint64_t last = last_sign(ln);
    look_at_lanes(c, ln, now);
    int is_silent = now > last && now - last > c->config.peer_timeout_ms * CLOCK_MS;
    if (is_silent && !c->leaving) { /* a peer that has the goodbye says nothing more */
        fail_silent(c, ln, comm_last_lost(ln), now - last);
    } else if (!ln->is_told) {
        judge_lanes(c, ln, now);
        beat(c, ln, now);
    }
}

/* ---- all of them, now and then ---- */

void comm_check_peers(rc_comm *c, uint64_t now)
{
    if (c->last_tick != 0 && now - c->last_tick > c->config.peer_timeout_ms * CLOCK_MS / 2)
        forgive(c, now);
    c->last_tick = now;
    for (int rank = 0; rank < c->env.world_size; rank++) {
        peer_link *ln = c->env.links[rank];
        if (ln != NULL && !link_is_left(ln))
            check_peer(c, ln, now);
    }
}

/* ---- what a timeout says of them ---- */

static size_t list_lane(const rc_comm *c, const lane *l, char *text, size_t size)
{
    const lane_health *h = &l->health;
    char name[LANE_NAME_BYTES], waiting[16], moved[16];
    int in_flight;
    uint64_t acked = lane_acked(l, &in_flight), now = clock_ns();
    int length =
        snprintf(text, size, "; %s: %s unacknowledged, %s acknowledged in the last %.0f s",
                 comm_name_lane(c, l, name, sizeof name), bytes_text(lane_unacked(l), waiting),
                 bytes_text(acked > h->marks[0] ? acked - h->marks[0] : 0, moved),
                 clock_seconds(h->times[0], now));
    if (length < 0 || (size_t)length >= size) {
        text[0] = '\0'; /* a cut text would mislead */
        return 0;
    }
    return (size_t)length;
}

const char *comm_list_unacked(const rc_comm *c, char *text, size_t size)
{
    size_t used = 0;
    int in_flight;
    text[0] = '\0';
    for (int moving = 0; moving < 2; moving++)
        for (int rank = 0; rank < c->env.world_size; rank++) {
            const peer_link *ln = c->env.links[rank];
            for (int i = 0; ln != NULL && i < ln->lane_count; i++) {
                const lane *l = ln->lanes[i];
                int moved = lane_acked(l, &in_flight) > l->health.marks[0];
                if (moved == moving && lane_unacked(l) > 0)
                    used += list_lane(c, l, text + used, size - used);
            }
        }
    return text;
}

/* port_watch.c - the ports of this host as the kernel reports them, and the lanes of a port that is
 * lost. See inside.h and net/ports.h.
 *
 * Invariant. A port that comes back within port_grace() was never lost.
 */
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../base/clock.h"
#include "../base/error.h"
#include "inside.h"

/* Returns ns: a network manager may take an address away and give it back at once. Where its lanes
 * are made anew a mistake costs little. */
static uint64_t port_grace(const rc_comm *c)
{
    enum { ENDS_MS = 400, RECOVERS_MS = 100 };
    return (c->config.recovers ? RECOVERS_MS : ENDS_MS) * CLOCK_MS;
}

static const char *port_text(const lane *l)
{
    switch (l->health.port) {
    case PORT_NO_CARRIER: return "has no carrier: look at its cable, and what that is plugged into";
    case PORT_DOWN: return "was taken down (ip link set ... up brings it back)";
    case PORT_GONE: return "was removed, or moved to another network namespace";
    case PORT_RUNS: break;
    }
    return "has lost its address: look at what configures it (ip address, DHCP)";
}

static void judge_port(rc_comm *c, lane *l)
{
    char name[LANE_NAME_BYTES];
    rc_error why;
    error_clear(&why);
    error_set(&why, RC_PEER_LOST, "%s is cut: the port of rank %d %s",
              comm_name_lane(c, l, name, sizeof name), c->env.rank, port_text(l));
    why.rank = c->env.rank;
    comm_lose_lane(c, l, &why);
}

/* Returns when the lane's port is to be judged if it does not come back. */
static uint64_t port_due(const rc_comm *c, const lane *l)
{
    return comm_monitors_lane(l) && l->health.port_lost != 0 ? l->health.port_lost + port_grace(c)
                                                             : ENGINE_NEVER;
}

uint64_t comm_check_ports(rc_comm *c, uint64_t now)
{
    uint64_t next = ENGINE_NEVER;
    for (int rank = 0; rank < c->env.world_size; rank++) {
        const peer_link *ln = c->env.links[rank];
        for (int i = 0; ln != NULL && i < ln->lane_count; i++) {
            uint64_t due = port_due(c, ln->lanes[i]);
            if (due <= now)
                judge_port(c, ln->lanes[i]);
            else if (due < next)
                next = due;
        }
    }
    return next;
}

/* Notes a change of the state of a lane's port. */
static void note_port(rc_comm *c, lane *l)
{
    lane_health *h = &l->health;
    int lost = h->port != PORT_RUNS || h->no_address;
    if (!lost)
        h->port_lost = 0;
    else if (h->port_lost == 0)
        h->port_lost = clock_ns();
    if (lost && comm_monitors_lane(l))
        engine_schedule(c->engine, &c->member, port_due(c, l));
}

/* Returns 1 if the lane's end here has this address. */
static int has_address(const lane *l, const uint8_t *bytes, int length)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } end;
    socklen_t size = sizeof end;
    memset(&end, 0, sizeof end);
    if (l->source.fd < 0 || getsockname(l->source.fd, &end.any, &size) != 0)
        return 0;
    if (end.any.sa_family == AF_INET && length == 4)
        return memcmp(&end.v4.sin_addr, bytes, 4) == 0;
    return end.any.sa_family == AF_INET6 && length == 16 &&
           memcmp(&end.v6.sin6_addr, bytes, 16) == 0;
}

/* Calls each for all lanes over this port; 0: over any watched port. */
static void for_lanes(port_watch *w, int port, void (*each)(lane *l, const void *arg),
                      const void *arg)
{
    rc_comm *c = w->owner;
    for (int rank = 0; rank < c->env.world_size; rank++) {
        const peer_link *ln = c->env.links[rank];
        for (int i = 0; ln != NULL && i < ln->lane_count; i++) {
            lane *l = ln->lanes[i];
            if (l->path.port == 0 || (port != 0 && l->path.port != port))
                continue;
            each(l, arg);
            note_port(c, l);
        }
    }
}

static void set_port_state(lane *l, const void *arg)
{
    l->health.port = *(const port_state *)arg;
}

static void link_changed(port_watch *w, int port, port_state state)
{
    if (port > 0)
        for_lanes(w, port, set_port_state, &state);
}

typedef struct address_news {
    const uint8_t *bytes;
    int length, there;
} address_news;

static void set_address(lane *l, const void *arg)
{
    const address_news *news = arg;
    if (has_address(l, news->bytes, news->length))
        l->health.no_address = !news->there;
}

static void address_changed(port_watch *w, int port, const uint8_t *bytes, int length, int there)
{
    if (port > 0)
        for_lanes(w, port, set_address, &(address_news){bytes, length, there});
}

static void set_well(lane *l, const void *arg)
{
    (void)arg;
    l->health.port = PORT_RUNS;
    l->health.no_address = 0;
}

static void forget(port_watch *w)
{
    for_lanes(w, 0, set_well, NULL);
}

void comm_watch_ports(rc_comm *c, int fd)
{
    c->ports = (port_watch){.source.fd = fd,
                            .owner = c,
                            .link = link_changed,
                            .address = address_changed,
                            .forget = forget};
}

void comm_open_ports(rc_comm *c)
{
    if (c->ports.source.fd < 0 || ports_open(&c->ports, c->engine) == RC_OK)
        return;
    close(c->ports.source.fd); /* then only the silence of lanes shows a lost port */
    c->ports.source.fd = -1;
}

void comm_close_ports(rc_comm *c)
{
    if (c->state != COMM_NEW) {
        engine_remove(c->engine, &c->ports.source);
    } else if (c->ports.source.fd >= 0) {
        close(c->ports.source.fd);
        c->ports.source.fd = -1;
    }
}

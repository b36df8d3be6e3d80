/* ports.h - what the kernel tells of this host's network ports: links that come and go, addresses
 * that are taken away.
 *
 * The descriptor is a netlink socket that the caller has opened, in the network namespace of the
 * lanes, and subscribed to links and addresses. Its messages are read in the engine's loop; nothing
 * is ever asked. Where the kernel had to drop some, what was told so far is worth nothing: that a
 * port is back may be among them. They are not missed, as the silence of a lane shows the same
 * later.
 *
 * Invariants. Every field of a message is bounded before use; what is not understood is skipped.
 * Threading: under the engine's lock.
 */
#ifndef RINGCOMM_PORTS_H
#define RINGCOMM_PORTS_H

#include <stdint.h>

#include "engine.h"

typedef enum port_state {
    PORT_RUNS = 0,
    PORT_NO_CARRIER, /* no cable, or nothing at its other end */
    PORT_DOWN,       /* taken down here */
    PORT_GONE        /* removed, or moved to another namespace */
} port_state;

typedef struct port_watch {
    engine_source source; /* first: the engine hands it back. fd is -1 without one */
    rc_engine *engine;
    void *owner;
    /* The port of this index is in this state; also where that is what it was. */
    void (*link)(struct port_watch *w, int port, port_state state);
    /* It has (1) or has no more (0) this address: 4 bytes of AF_INET or 16 of AF_INET6. */
    void (*address)(struct port_watch *w, int port, const uint8_t *bytes, int length, int there);
    /* What link and address have said may not be so any more. */
    void (*forget)(struct port_watch *w);
    int stale; /* so is what is still to be read */
} port_watch;

/* Watches source.fd; owner, link, address and forget are set. engine_remove ends it. */
rc_result ports_open(port_watch *w, rc_engine *e);
/* One datagram of the descriptor; public for tests. */
void ports_parse(port_watch *w, const void *data, size_t length);

#endif

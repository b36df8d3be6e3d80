/* ports.h - the kernel's news of this host's network ports: links that come and go, addresses that
 * are removed.
 *
 * The descriptor is a netlink socket that the caller has opened, in the network namespace of the
 * lanes, and subscribed to links and addresses. Its messages are read in the engine's loop; nothing
 * is ever requested. If the kernel had to drop messages, all earlier ones are void: the return of a
 * port may be among the lost. Nothing depends on them, as the silence of a lane shows the same
 * later.
 *
 * Invariants. Every field of a message is bounded before use; unknown messages are skipped.
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
    engine_source source; /* must be first: the engine hands it back. fd is -1 without one */
    rc_engine *engine;
    void *owner;
    /* Reports the state of a port, by index, whether it has changed or not. */
    void (*link)(struct port_watch *w, int port, port_state state);
    /* Reports that a port has (1) or has lost (0) an address: 4 bytes of AF_INET or 16 of AF_INET6.
     */
    void (*address)(struct port_watch *w, int port, const uint8_t *bytes, int length, int there);
    /* Voids all that link and address have reported. */
    void (*forget)(struct port_watch *w);
    int stale; /* messages still to be read are void, too */
} port_watch;

/* Watches source.fd; owner, link, address and forget are set. engine_remove ends it. */
rc_result ports_open(port_watch *w, rc_engine *e);
/* Parses one datagram of the descriptor; public for tests. */
void ports_parse(port_watch *w, const void *data, size_t length);

#endif

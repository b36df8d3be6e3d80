/* meter.h - the rate at which a stream arrives, which a lane's receiver measures and sends to its
 * sender.
 *
 * The sender cannot measure it well. Acknowledgements wait behind the data that flows the other
 * way, by as much as a whole message takes, and vary with it. Arrivals have nothing in front of
 * them, so bytes over time is the rate, as long as the stream is never waiting for its sender:
 *
 *     | pause | burst |<------- measured ------->| pause
 *
 * A pause ends a measurement. After it the bytes that a shaper has saved up meanwhile come at once:
 * these and their time are left out, unless they come too late for that.
 *
 * Pure: no OS; times are given. Not thread-safe.
 */
#ifndef RINGCOMM_METER_H
#define RINGCOMM_METER_H

#include <stddef.h>
#include <stdint.h>

typedef struct rate_meter {
    double rate;        /* bytes per ns; 0: not known */
    double backing;     /* ns of measured stream behind the rate */
    double bytes, span; /* of the current measurement; ns */
    double burst;       /* bytes to leave out first */
    double burst_span;  /* ns in which bytes were left out */
    uint64_t last;      /* when bytes arrived last; 0: never */
    int news;           /* the rate has changed; its reader resets this */
} rate_meter;

/* Starts with a rate that was measured elsewhere; 0: none. */
void meter_init(rate_meter *m, double rate);
/* Notes that so many bytes were read now (ns). between_frames: all frames before them were
 * complete, so that the stream may have waited for its sender. */
void meter_arrived(rate_meter *m, uint64_t now, size_t bytes, int between_frames);

#endif

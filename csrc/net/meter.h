/* meter.h - how fast a stream arrives: what a lane's receiver knows and tells its sender.
 *
 * The sender cannot measure it well. Acknowledgements wait behind the data that flows the other
 * way, by as much as a whole message takes, and vary with it. Arrivals have nothing in front of
 * them, so bytes over time is the rate, as long as the stream is never waiting for its sender:
 *
 *     | pause | burst |<------- measured ------->| pause
 *
 * A pause ends a measurement, and after it come, at once, the bytes that a shaper has saved up
 * meanwhile: these and their time are left out, unless they come too late for that.
 *
 * Pure: no OS; times are given. Not thread-safe.
 */
#ifndef RINGCOMM_METER_H
#define RINGCOMM_METER_H

#include <stddef.h>
#include <stdint.h>

typedef struct rate_meter {
    double rate;        /* bytes per ns; 0: not known */
    double backing;     /* ns of stream that the rate rests on */
    double bytes, span; /* of the measurement that runs; ns */
    double burst;       /* bytes to leave out first */
    double burst_span;  /* ns for which some were left out */
    uint64_t last;      /* when something arrived last; 0: never */
    int news;           /* the rate was measured anew; whoever uses it resets this */
} rate_meter;

/* Starts with a rate that was measured elsewhere; 0: none. */
void meter_init(rate_meter *m, double rate);
/* Takes in that so many bytes were read now, ns. between_frames: all frames before them were
 * complete, so that the stream may have waited for its sender. */
void meter_arrived(rate_meter *m, uint64_t now, size_t bytes, int between_frames);

#endif

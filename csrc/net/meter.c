/* meter.c - see meter.h. */
#include "meter.h"

#define MS 1e6

/* Time that a given rate counts for: it was measured for about as long, over another way. */
static const double GIVEN_NS = 32 * MS;
/* Memory of a rate, in ns of measured stream. */
static const double MEMORY_NS = 64 * MS;
static const double WINDOW_NS = 2 * MS;
/* Longest gap in a stream that does not pause: the receiver's own delays, or the time of
 * PACKETS_BYTES. */
static const double PAUSE_NS = 0.2 * MS;
static const double PACKETS_BYTES = 4 * 1500;
enum { NO_PACKET = 512 }; /* bytes, fewer than a full packet has: the sender had no more */
static const double NO_FASTER = 1.1; /* a rate above the known one by less than this is noise */
/* A shaper saves up at most BUCKET_BYTES, or what it passes in BUCKET_NS if that is more; they come
 * out within BURST_NS. */
static const double BUCKET_BYTES = 128 << 10, BUCKET_NS = 1.25 * MS, BURST_NS = 2 * MS;

void meter_init(rate_meter *m, double rate)
{
    *m = (rate_meter){.rate = rate, .backing = rate > 0.0 ? GIVEN_NS : 0.0};
}

/* Returns 1 if the stream has paused. Within a frame it never waits for its sender, which had all
 * of it. Headers alone are no stream, however soon they follow each other: on a lane that gets no
 * data, as it is slow, they would make it slower and slower. */
static int is_pause(const rate_meter *m, double elapsed, double bytes, int between_frames)
{
    if (m->last == 0)
        return 1;
    return between_frames && elapsed > PAUSE_NS &&
           (m->rate == 0.0 || elapsed * m->rate > PACKETS_BYTES || bytes < NO_PACKET);
}

/* Returns the bytes that the shaper holds after a pause, with what was left before. */
static double saved_up(const rate_meter *m, double pause)
{
    double most = m->rate * BUCKET_NS, saved = m->burst + m->rate * pause;
    if (most < BUCKET_BYTES)
        most = BUCKET_BYTES;
    return m->last == 0 || m->rate == 0.0 || saved > most ? most : saved;
}

/* Returns 1 for bytes within a frame that come after so long that nothing saved up is left: saved
 * bytes would have come at once, and made the stream seem faster rather than slower than it is.
 * Where a slow port passes large packets whole (GSO), a frame is two of them, and a frame that
 * waited for none shows no more than the time between these. */
static int is_no_burst(const rate_meter *m, double elapsed, double bytes, int between_frames)
{
    return !between_frames && elapsed > PAUSE_NS && bytes < NO_FASTER * elapsed * m->rate;
}

static void close_window(rate_meter *m)
{
    m->backing += m->span;
    m->rate += (m->bytes / m->span - m->rate) * m->span / m->backing;
    if (m->backing > MEMORY_NS)
        m->backing = MEMORY_NS;
    m->bytes = m->span = 0.0;
    m->news = 1;
}

void meter_arrived(rate_meter *m, uint64_t now, size_t bytes, int between_frames)
{
    double elapsed = (double)(now - m->last);
    if (is_pause(m, elapsed, (double)bytes, between_frames)) {
        m->burst = saved_up(m, elapsed);
        m->burst_span = 0.0;
    } else if (m->burst > 0.0 && !is_no_burst(m, elapsed, (double)bytes, between_frames)) {
        m->burst = m->burst > (double)bytes ? m->burst - (double)bytes : 0.0;
        m->burst_span += elapsed;
        if (m->burst_span > BURST_NS)
            m->burst = 0.0;
    } else {
        m->bytes += (double)bytes;
        m->span += elapsed;
        if (m->span >= WINDOW_NS && m->bytes >= PACKETS_BYTES)
            close_window(m);
    }
    m->last = now;
}

/* test_meter.c - the rate of arrivals: what counts as the stream's speed and what does not. */
#include <math.h>

#include "../../csrc/base/clock.h"
#include "../../csrc/net/meter.h"
#include "check.h"

enum { US = 1000, PACKET = 1500 };

static const double LINE = 0.125; /* bytes per ns: 1 Gbit/s */

static int near(double value, double expected, double tolerance)
{
    return fabs(value - expected) <= tolerance * expected;
}

/* A stream of bytes at a rate, read every 20 us, in frames of 64 KiB. Returns when it ends. */
static uint64_t stream(rate_meter *m, uint64_t now, double rate, size_t bytes)
{
    const size_t frame = 64 << 10, step = (size_t)(rate * 20 * US) + 1;
    size_t in_frame = 0;
    for (size_t done = 0; done < bytes; done += step, in_frame += step) {
        now += (uint64_t)((double)step / rate);
        meter_arrived(m, now, step, in_frame >= frame);
        if (in_frame >= frame)
            in_frame -= frame;
    }
    return now;
}

static uint64_t pause_for(rate_meter *m, uint64_t now, uint64_t ns, size_t burst)
{
    meter_arrived(m, now + ns, burst, 1); /* what a shaper saved up comes at once */
    return now + ns;
}

static void steady_stream_has_its_rate(void)
{
    static const double rates[] = {0.00125, 0.0125, 0.125, 1.25, 12.5};
    for (size_t i = 0; i < CHECK_COUNT(rates); i++) {
        rate_meter m;
        meter_init(&m, 0.0);
        stream(&m, CLOCK_S, rates[i], (size_t)(rates[i] * 60e6) + (256 << 10));
        CHECK(m.news);
        CHECK(near(m.rate, rates[i], 0.01));
    }
}

static void too_little_says_nothing(void)
{
    rate_meter m;
    meter_init(&m, 0.0);
    stream(&m, CLOCK_S, LINE, 64 << 10);
    CHECK(!m.news && m.rate == 0.0);
}

static void pauses_are_no_slowness(void)
{
    rate_meter m;
    meter_init(&m, 0.0);
    uint64_t now = CLOCK_S;
    for (int i = 0; i < 20; i++) {
        now = stream(&m, now, LINE, 1 << 20);
        now = pause_for(&m, now, 5 * CLOCK_MS, PACKET);
    }
    CHECK(near(m.rate, LINE, 0.01));
}

/* A bucket of 128 KiB that is full after each pause. */
static void bursts_are_no_speed(void)
{
    rate_meter m;
    meter_init(&m, 0.0);
    uint64_t now = CLOCK_S;
    for (int i = 0; i < 20; i++) {
        now = pause_for(&m, now, 5 * CLOCK_MS, PACKET);
        now = stream(&m, now, 5.0, 128 << 10);
        now = stream(&m, now, LINE, 1 << 20);
    }
    CHECK(near(m.rate, LINE, 0.05));
}

/* A short message after a long pause leaves the bucket nearly full, for the long one behind it. */
static void bursts_are_left_over(void)
{
    rate_meter m;
    meter_init(&m, LINE / 10);
    uint64_t now = pause_for(&m, CLOCK_S, 50 * CLOCK_MS, PACKET);
    now = pause_for(&m, now, CLOCK_MS, PACKET);
    now = pause_for(&m, now, CLOCK_MS, PACKET);
    now = stream(&m, now, 5.0, 120 << 10);
    stream(&m, now, LINE / 10, 256 << 10);
    CHECK(near(m.rate, LINE / 10, 0.05));
}

/* Messages that a bucket lets through whole leave a known rate as it is. */
static void small_messages_change_nothing(void)
{
    rate_meter m;
    meter_init(&m, LINE);
    uint64_t now = CLOCK_S;
    for (int i = 0; i < 100; i++) {
        now = pause_for(&m, now, 5 * CLOCK_MS, PACKET);
        now = stream(&m, now, 5.0, 100 << 10);
    }
    CHECK(m.rate == LINE && !m.news);
}

/* Acknowledgements and heartbeats on a lane that gets no data: so often that a stream of packets at
 * its rate would have such gaps. */
static void headers_are_no_stream(void)
{
    enum { HEADER = 52 };
    rate_meter m;
    meter_init(&m, LINE / 250);
    for (uint64_t now = CLOCK_S; now < 100 * CLOCK_S; now += 11 * CLOCK_MS)
        meter_arrived(&m, now, HEADER, 1);
    CHECK(m.rate == LINE / 250 && !m.news);
}

/* Both ways, and within 400 ms of stream: also where every packet now is as late as a pause. */
static void change_is_followed(void)
{
    static const double factors[] = {0.01, 0.2, 5.0, 100.0};
    for (size_t i = 0; i < CHECK_COUNT(factors); i++) {
        rate_meter m;
        meter_init(&m, 0.0);
        uint64_t now = stream(&m, CLOCK_S, LINE, 8 << 20);
        double rate = LINE * factors[i];
        for (int calls = 0; calls < 40; calls++) {
            now = pause_for(&m, now, CLOCK_MS, PACKET);
            now = stream(&m, now, rate, (size_t)(rate * 10e6) + (64 << 10));
        }
        if (!CHECK(near(m.rate, rate, 0.1)))
            fprintf(stderr, "factor %g: %g\n", factors[i], m.rate / rate);
    }
}

/* A slow port passes packets of 64 KiB whole, two for each frame, and a call has few frames. What
 * comes first after each pause, and with it all of a frame, could be saved up; but not so late. */
static void packets_as_long_as_pauses(void)
{
    static const double rate = LINE / 5, believed[] = {1.0, 1.3, 5.0};
    enum { LUMP = 65160, REST = 65960, HEAD = 8192 };
    for (size_t i = 0; i < CHECK_COUNT(believed); i++) {
        rate_meter m;
        meter_init(&m, rate * believed[i]);
        uint64_t now = CLOCK_S;
        for (int frames = 0; frames < 120; frames++) {
            now += frames % 5 == 0 ? 8 * CLOCK_MS : (uint64_t)(LUMP / rate);
            meter_arrived(&m, now, HEAD, 1);
            meter_arrived(&m, now + 40 * US, LUMP - HEAD, 0);
            now += (uint64_t)(REST / rate);
            meter_arrived(&m, now, REST, 0);
        }
        if (!CHECK(near(m.rate, rate, 0.05)))
            fprintf(stderr, "believed %g: %g\n", believed[i], m.rate / rate);
    }
}

/* The reader was away: what waited in the kernel meanwhile then comes at once. */
static void late_reader_measures_the_same(void)
{
    rate_meter m;
    meter_init(&m, LINE);
    uint64_t now = CLOCK_S;
    for (int i = 0; i < 20; i++) {
        now = stream(&m, now, LINE, 500000);
        now += 3 * CLOCK_MS;
        for (int frames = 0; frames < 5; frames++)
            meter_arrived(&m, now, 75000, frames == 2);
    }
    CHECK(near(m.rate, LINE, 0.05));
}

int main(void)
{
    static const check_test tests[] = {
        {"steady_stream_has_its_rate", steady_stream_has_its_rate},
        {"too_little_says_nothing", too_little_says_nothing},
        {"pauses_are_no_slowness", pauses_are_no_slowness},
        {"bursts_are_no_speed", bursts_are_no_speed},
        {"bursts_are_left_over", bursts_are_left_over},
        {"small_messages_change_nothing", small_messages_change_nothing},
        {"headers_are_no_stream", headers_are_no_stream},
        {"change_is_followed", change_is_followed},
        {"packets_as_long_as_pauses", packets_as_long_as_pauses},
        {"late_reader_measures_the_same", late_reader_measures_the_same},
    };
    return check_run(tests, CHECK_COUNT(tests));
}

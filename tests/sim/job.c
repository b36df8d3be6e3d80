/* job.c - see job.h. */
#include "job.h"

enum { FAULT_TURNS = 6000, /* no fault comes later */ CALL_TIMEOUT_MS = 300000 };

static uint64_t pick(job *j, uint64_t bound)
{
    return draw_below(&j->random, bound);
}

#define PICK(j, array) ((array)[pick(j, sizeof(array) / sizeof(*(array)))])

int job_rank_of(const job_group *g, int process)
{
    int rank = 0;
    while (rank < g->size && g->process[rank] != process)
        rank++;
    return rank < g->size ? rank : -1;
}

/* ---- drawn: options ---- */

static void draw_config(job *j, job_group *g)
{
    static const uint32_t segments[] = {4096, 8192, 16384, 65536, 262144};
    static const uint32_t beats[] = {100, 200, 500, 1000};
    static const uint32_t patience[] = {5, 10, 20};
    enum { HOUR_MS = 3600000 };
    rc_comm_config_init(&g->config);
    g->config.world_size = g->size;
    g->config.epoch = (uint32_t)pick(j, 1000);
    g->config.algorithm = pick(j, 3) ? (rc_algorithm)pick(j, RC_ALGORITHM_COUNT) : RC_AUTO;
    g->config.segment_bytes = PICK(j, segments);
    g->config.heartbeat_ms = j->never_awakes ? HOUR_MS : PICK(j, beats);
    g->config.peer_timeout_ms = g->config.heartbeat_ms * PICK(j, patience);
}

/* Draws a wire whose buffers it carries within a tenth of the silence that ends a peer. */
static os_wire draw_wire(job *j, const rc_comm_config *config)
{
    static const uint32_t buffers[] = {4096, 20000, 100000, 400000};
    os_wire wire = {.send_buffer = PICK(j, buffers), .receive_buffer = PICK(j, buffers)};
    double fastest = 0.5, slowest = config->peer_timeout_ms * 1e6 / 10 / wire.send_buffer;
    slowest = slowest < 2000 ? slowest : 2000;
    wire.delay = 1000 + pick(j, pick(j, 2) ? 100000 : 10000000);
    wire.jitter = pick(j, 2) ? 0 : wire.delay;
    wire.ns_per_byte = fastest + pow((double)pick(j, 1000) / 1000, 3) * (slowest - fastest);
    return wire;
}

/* Draws which ranks share a host: as many on each, and two at least. */
static void draw_hosts(job *j, job_group *g)
{
    int on_each = 2 + (int)pick(j, (uint64_t)g->size - 1), interleaved = (int)pick(j, 2);
    if (g->size % on_each != 0 || pick(j, 2))
        return;
    g->hosts = g->size / on_each;
    for (int rank = 0; rank < g->size; rank++)
        g->host[rank] = interleaved ? rank % g->hosts : rank / on_each;
    g->config.one_host = g->hosts == 1;
    if (pick(j, 4))
        g->config.algorithm = RC_AUTO;
}

/* Draws the ranks: all processes in their order, or some of them in another. */
static void draw_ranks(job *j, job_group *g)
{
    g->size = j->processes;
    for (int i = 0; i < g->size; i++)
        g->process[i] = i;
    if (g == j->group || pick(j, 2))
        return;
    for (int i = g->size - 1; i > 0; i--) {
        int other = (int)pick(j, (uint64_t)i + 1), kept = g->process[i];
        g->process[i] = g->process[other];
        g->process[other] = kept;
    }
    g->size = 2 + (int)pick(j, (uint64_t)g->size - 1);
}

/* ---- drawn: calls ---- */

static void draw_calls(job *j, job_group *g)
{
    sim_call feeding = call_draw_feeding(&j->random, g->size);
    int feeds = pick(j, 3) == 0, repeats = pick(j, 3) == 0;
    g->calls = 1 + (int)pick(j, JOB_MOST_CALLS);
    g->in_flight = 1 + (int)pick(j, JOB_MOST_IN_FLIGHT);
    for (int i = 0; i < g->calls; i++) {
        sim_call *c = &g->call[i];
        *c = call_draw(&j->random, g->size, (uint32_t)i);
        c->encoded_by &= g->hosts == 0 ? UINT32_MAX : 0;
        if (repeats && i > 0 && pick(j, 4))
            *c = call_again(&g->call[i - 1], &j->random);
        if (feeds && pick(j, 2))
            *c = call_feed(&feeding, &j->random);
        c->call.timeout_ms = CALL_TIMEOUT_MS;
    }
}

static void draw_group(job *j, job_group *g)
{
    draw_ranks(j, g);
    draw_config(j, g);
    draw_hosts(j, g);
    g->is_split = g != j->group && pick(j, 2);
    g->rails = 1 + (int)pick(j, 3);
    g->lanes = 1 + (int)pick(j, 2);
    g->config.recovers = pick(j, 3) > 0;
    for (int i = 0; i < g->rails; i++)
        g->wire[i] = draw_wire(j, &g->config);
    draw_calls(j, g);
}

/* ---- drawn: faults ---- */

static void draw_faults(job *j)
{
    static const int counts[] = {0, 1, 1, 1, 1, 1, 2, 3};
    static const fault_kind often[] = {FAULT_FLIP, FAULT_FLIP,     FAULT_RST,   FAULT_RST,
                                       FAULT_FIN,  FAULT_DARK_ONE, FAULT_CLOSE, FAULT_SLOW};
    int gentle = j->never_awakes || pick(j, 3) == 0;
    j->faults = PICK(j, counts);
    for (int i = 0; i < j->faults; i++) {
        fault *f = &j->fault[i];
        f->kind = (fault_kind)pick(j, gentle ? FAULT_HARMLESS : FAULT_KINDS);
        if (!gentle && pick(j, 4) == 0)
            f->kind = PICK(j, often);
        f->turn = (int)pick(j, 1ULL << pick(j, 13)) % FAULT_TURNS;
        f->lane = (int)pick(j, 1 << 20); /* of as many as there are then */
        f->end = (int)pick(j, 2);
    }
}

static os_mood draw_mood(job *j)
{
    static const unsigned often[] = {0, 0, 10, 100, 400};
    return (os_mood){.interrupted = PICK(j, often) / 2,
                     .refused = PICK(j, often) / 2,
                     .partial = PICK(j, often) * 2};
}

void job_draw(job *j, uint64_t seed)
{
    static const char *const kernels[] = {NULL, "scalar"};
    static const uint64_t paces[] = {1, MS, 20 * MS, 300 * MS};
    *j = (job){.seed = seed, .random = mix(seed + 0x9e3779b97f4a7c15u) | 1};
    j->processes = 2 + (int)pick(j, pick(j, 2) ? 2 : OS_MOST_RANKS - 1);
    j->groups = 1 + (pick(j, 4) == 0);
    j->never_awakes = pick(j, 4) == 0;
    for (int i = 0; i < j->processes; i++) {
        j->kernels[i] = PICK(j, kernels);
        j->begins[i] = pick(j, 5 * MS);
        j->pace[i] = PICK(j, paces);
    }
    for (int i = 0; i < j->groups; i++)
        draw_group(j, &j->group[i]);
    draw_faults(j);
    j->mood = draw_mood(j);
}

void job_leave_out(job *j, const job_part *part)
{
    for (int i = 0; i < j->faults; i++)
        if (!(part->faults >> i & 1))
            j->fault[i].turn = -1;
    for (int i = 0; i < j->groups; i++)
        if (j->group[i].calls > part->calls[i])
            j->group[i].calls = part->calls[i];
    if (part->is_calm)
        j->mood = (os_mood){0, 0, 0};
}

/* ---- journeys ---- */

typedef enum journey {
    JOURNEY_ONE_SHOT,
    JOURNEY_RING,
    JOURNEY_FEEDBACK,
    JOURNEY_SPLIT,
    JOURNEY_BARRIER,
    JOURNEY_SEND,
    JOURNEYS
} journey;

static const char *const journey_names[JOURNEYS] = {
    [JOURNEY_ONE_SHOT] = "one-shot", [JOURNEY_RING] = "ring",       [JOURNEY_FEEDBACK] = "feedback",
    [JOURNEY_SPLIT] = "split",       [JOURNEY_BARRIER] = "barrier", [JOURNEY_SEND] = "send"};

const char *job_journey_name(int number)
{
    return number < JOURNEYS ? journey_names[number] : NULL;
}

static void add_call(job_group *g, sim_call c)
{
    c.call.timeout_ms = CALL_TIMEOUT_MS;
    c.salt = (uint64_t)g->calls + 1;
    g->call[g->calls++] = c;
}

static void start_group(job_group *g, int size, int recovers, rc_algorithm algorithm)
{
    g->size = size;
    rc_comm_config_init(&g->config);
    g->config.world_size = size;
    g->config.algorithm = algorithm;
    g->config.segment_bytes = 64 << 10;
    g->config.heartbeat_ms = 200;
    g->config.peer_timeout_ms = 2000;
    g->config.recovers = recovers;
    g->rails = 2;
    g->lanes = 1;
    g->wire[0] = (os_wire){
        .delay = 50000, .ns_per_byte = 8, .send_buffer = 100000, .receive_buffer = 100000};
    g->wire[1] = g->wire[0];
    g->wire[1].ns_per_byte = 3.2;
    g->in_flight = 2;
    for (int i = 0; i < size; i++)
        g->process[i] = i;
}

static sim_call plain_call(rc_collective collective, uint64_t count)
{
    return (sim_call){.call = {.collective = collective, .dtype = RC_F32, .count = count}};
}

/* Process 2 is in the first group alone, and the others change places. */
static void split(job *j)
{
    job_group *child = &j->group[1];
    add_call(&j->group[0], plain_call(RC_ALLGATHER, 2)); /* colours and keys */
    j->groups = 2;
    start_group(child, JOB_JOURNEY_PROCESSES - 1, j->group[0].config.recovers, RC_AUTO);
    child->is_split = 1;
    for (int i = 0; i < child->size; i++)
        child->process[i] = child->size - 1 - i;
    add_call(child, plain_call(RC_BARRIER, 0));
    add_call(child, plain_call(RC_ALLREDUCE, 1000));
}

static void exchange_sends(job_group *g)
{
    for (int from = 0; from < JOB_JOURNEY_PROCESSES; from++) {
        sim_call c = plain_call(RC_SEND, from == 0 ? 50000 : 10);
        c.from = from;
        c.call.root = (from + 1) % JOB_JOURNEY_PROCESSES;
        c.any = from == 1;
        c.call.tag = (uint32_t)from;
        add_call(g, c);
    }
}

void job_journey(job *j, int number, int recovers, const fault *faults, int count)
{
    static const rc_algorithm algorithms[JOURNEYS] = {[JOURNEY_ONE_SHOT] = RC_ONE_SHOT,
                                                      [JOURNEY_RING] = RC_RING};
    *j = (job){.random = 1, .processes = JOB_JOURNEY_PROCESSES, .groups = 1, .faults = count};
    for (int i = 0; i < count; i++)
        j->fault[i] = faults[i];
    j->seed = count > 0 ? faults[0].event : 0;
    job_group *g = &j->group[0];
    j->is_alone = 1;
    for (int i = 0; i < j->processes; i++)
        j->pace[i] = 1;
    start_group(g, j->processes, recovers, algorithms[number]);
    sim_call feeding = plain_call(RC_ALLREDUCE, 3000);
    feeding.call.codec = RC_CODEC_INT4;
    feeding.feeds = 1;
    feeding.fed = RC_CODEC_INT4;
    switch ((journey)number) {
    case JOURNEY_ONE_SHOT: add_call(g, plain_call(RC_ALLREDUCE, 1024)); break;
    case JOURNEY_RING: add_call(g, plain_call(RC_ALLREDUCE, 1 << 18)); break;
    case JOURNEY_FEEDBACK:
        add_call(g, feeding);
        add_call(g, feeding);
        break;
    case JOURNEY_SPLIT: split(j); break;
    case JOURNEY_BARRIER: add_call(g, plain_call(RC_BARRIER, 0)); break;
    default: exchange_sends(g);
    }
}

/* shared.c - see shared.h. */
#include "shared.h"

#include "../base/copy.h"
#include "../base/error.h"
#include "work.h"

/* Laps of one shared_pump at most. */
enum { LAPS_PER_PUMP = 16 };

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t mine(const shared_memory *s, region_stage stage)
{
    return region_done_by(&s->region, s->region.self, stage);
}

static uint64_t end_of(const rc_work *w)
{
    return w->shared.first + w->shared.laps;
}

/* ---- geometry ---- */

/* A range of the tensor's elements. */
typedef struct span {
    uint64_t start, count;
} span;

static span chunk_of(const shared_run *run, uint32_t chunk)
{
    uint64_t start = smaller(chunk * run->chunk_elems, run->call.count);
    return (span){start, smaller(run->chunk_elems, run->call.count - start)};
}

static uint64_t chunk_elems_of(uint64_t count, uint64_t chunks)
{
    uint64_t unit = chunks * PLAN_ALIGN;
    return (count + unit - 1) / unit * PLAN_ALIGN;
}

feedback_range shared_own_chunk(const shared_memory *s, uint64_t count)
{
    uint64_t elems = chunk_elems_of(count, (uint64_t)s->region.ranks);
    uint64_t start = smaller((uint64_t)s->region.self * elems, count);
    return (feedback_range){start, smaller(start + elems, count)};
}

/* Returns the elements of a chunk that pass in one lap. */
static span span_of(const shared_run *run, uint32_t chunk, uint64_t lap)
{
    span whole = chunk_of(run, chunk);
    uint64_t within = smaller((lap - run->first) * run->lap_elems, whole.count);
    return (span){whole.start + within, smaller(run->lap_elems, whole.count - within)};
}

static const uint8_t *src_at(const shared_run *run, span at)
{
    return (const uint8_t *)run->call.src + at.start * run->codec.elem_bytes;
}

static uint8_t *dst_at(const shared_run *run, span at)
{
    return (uint8_t *)run->call.dst + at.start * run->codec.elem_bytes;
}

/* Returns the place of a chunk's elements in a rank's contribution. */
static uint8_t *part_at(const shared_memory *s, int rank, uint64_t lap, uint32_t chunk)
{
    return region_contribution(&s->region, rank, lap) + chunk * region_part_bytes(&s->region);
}

/* ---- the stages of a lap ---- */

/* Returns 1 for the root of a broadcast; on a single host a rank's place is its rank. */
static int is_root(const shared_memory *s, const rc_work *w)
{
    return s->region.self == w->shared.call.root;
}

/* Returns 1 if the others need values of this rank. */
static int has_part(const shared_memory *s, const rc_work *w)
{
    return w->shared.call.collective != RC_BROADCAST || is_root(s, w);
}

/* Counts bytes put into shared memory for others to read. */
static void count_bytes(shared_memory *s, rc_work *w, uint64_t bytes)
{
    s->bytes += bytes;
    w->stats.shared_bytes += bytes;
}

static void contribute_lap(shared_memory *s, rc_work *w, uint64_t lap)
{
    region *r = &s->region;
    const shared_run *run = &w->shared;
    region_rank *self = &r->rank[r->self];
    for (uint32_t chunk = 0; chunk < run->chunks && has_part(s, w); chunk++) {
        span at = span_of(run, chunk, lap);
        if (run->chunks > 1 && (int)chunk == r->self)
            continue;
        codec_encode(&run->codec, part_at(s, r->self, lap, chunk), src_at(run, at), at.count);
        count_bytes(s, w, at.count * run->codec.wire_bytes);
    }
    self->call[lap % REGION_DEPTH].seq = w->seq;
    self->call[lap % REGION_DEPTH].fingerprint = w->fingerprint;
    region_advance(r, REGION_CONTRIBUTED);
}

/* Reports that another rank contributes to a different call. If that one belongs to an earlier or
 * later collective, one of the two ranks called the earlier one otherwise, over links. */
static rc_result report_mismatch(const shared_memory *s, const rc_work *w, int rank, uint64_t seq,
                                 uint64_t fingerprint, rc_error *error)
{
    char here[FINGERPRINT_TEXT] = "something else", there[FINGERPRINT_TEXT];
    uint64_t first = smaller(seq, w->seq);
    if (first == w->seq)
        fingerprint_text(w->fingerprint, here, sizeof here);
    else if (w->seq - first <= s->history_length)
        fingerprint_text(s->history[first % s->history_length], here, sizeof here);
    fingerprint_text(fingerprint, there, sizeof there);
    error_set(error, RC_MISMATCH,
              "ranks differ in collective #%llu: rank %d called %s, rank %d called %s%s"
              "; " FINGERPRINT_ADVICE,
              (unsigned long long)first, s->rank_at[s->region.self], here, rank,
              seq == first ? "" : "something else, then ", there);
    error->rank = rank;
    error->seq = first;
    return RC_MISMATCH;
}

static rc_result check_calls(const shared_memory *s, const rc_work *w, uint64_t lap,
                             rc_error *error)
{
    for (int i = 0; i < s->region.ranks; i++) {
        const region_rank *other = &s->region.rank[i];
        uint64_t fingerprint = other->call[lap % REGION_DEPTH].fingerprint;
        uint64_t seq = other->call[lap % REGION_DEPTH].seq;
        if (!fingerprint_matches(fingerprint, w->fingerprint) || seq != w->seq)
            return report_mismatch(s, w, s->rank_at[i], seq, fingerprint, error);
    }
    return RC_OK;
}

/* Copies joined elements into the tensor. */
static void store_joined(const shared_run *run, span at, const uint8_t *result)
{
    const codec *c = &run->codec;
    if (codec_stores_plain(c) && run->call.count * c->elem_bytes >= COPY_PAST_CACHE_BYTES)
        copy_past_cache(dst_at(run, at), result, at.count * c->elem_bytes);
    else
        codec_store(c, dst_at(run, at), result, at.count);
}

/* Announces a result that lies in its slot. */
static void put_result(shared_memory *s, rc_work *w, uint64_t bytes)
{
    count_bytes(s, w, bytes);
    region_advance(&s->region, REGION_RESULTED);
}

/* Stores the root's values, as all decode them; the root may have them in place. */
static void take_broadcast(const shared_memory *s, const rc_work *w, uint64_t lap)
{
    const shared_run *run = &w->shared;
    int in_place = run->call.src == run->call.dst && codec_stores_plain(&run->codec);
    if (!is_root(s, w) || !in_place)
        store_joined(run, span_of(run, 0, lap), part_at(s, run->call.root, lap, 0));
}

/* Joins all ranks' contributions to the whole, or to this rank's chunk. */
static void join_contributions(shared_memory *s, rc_work *w, uint64_t lap)
{
    region *r = &s->region;
    const shared_run *run = &w->shared;
    const codec *c = &run->codec;
    const void *wires[REGION_MAX_RANKS];
    int one_shot = run->chunks == 1;
    uint32_t chunk = one_shot ? 0 : (uint32_t)r->self;
    span at = span_of(run, chunk, lap);
    for (int i = 0; i < r->ranks; i++)
        wires[i] = i == r->self ? NULL : part_at(s, i, lap, chunk);
    if (one_shot || s->hosts > 1) {
        codec_join(c, dst_at(run, at), 0, wires, r->ranks, src_at(run, at), at.count);
    } else {
        uint8_t *result = region_result(r, r->self, lap);
        codec_join(c, result, !codec_stores_plain(c), wires, r->ranks, src_at(run, at), at.count);
        store_joined(run, at, result);
        put_result(s, w, at.count * c->wire_bytes);
    }
}

static rc_result join_lap(shared_memory *s, rc_work *w, uint64_t lap, rc_error *error)
{
    RC_TRY(check_calls(s, w, lap, error));
    if (w->shared.call.collective == RC_BROADCAST)
        take_broadcast(s, w, lap);
    else
        join_contributions(s, w, lap);
    region_advance(&s->region, REGION_JOINED);
    if (w->shared.chunks == 1)
        put_result(s, w, 0); /* nobody reads it */
    return RC_OK;
}

/* Puts this rank's chunk, reduced among hosts over links, into its slot. */
static void result_lap(shared_memory *s, rc_work *w, uint64_t lap)
{
    const shared_run *run = &w->shared;
    span at = span_of(run, (uint32_t)s->region.self, lap);
    size_t bytes = at.count * run->codec.elem_bytes;
    copy_bytes(region_result(&s->region, s->region.self, lap), dst_at(run, at), bytes);
    put_result(s, w, bytes);
}

static void collect_lap(shared_memory *s, const rc_work *w, uint64_t lap)
{
    region *r = &s->region;
    const shared_run *run = &w->shared;
    uint32_t chunks = run->chunks; /* begins at the next rank, so that not all read the same */
    for (uint32_t distance = 1; distance < chunks; distance++) {
        uint32_t chunk = ((uint32_t)r->self + distance) % chunks;
        span at = span_of(run, chunk, lap);
        store_joined(run, at, region_result(r, (int)chunk, lap));
    }
    region_advance(r, REGION_COLLECTED);
}

/* ---- one after the other ---- */

/* Notes a count of laps to wait for; the least one of each stage counts. */
static void await(uint64_t awaited[REGION_STAGES], region_stage stage, uint64_t laps)
{
    awaited[stage] = smaller(awaited[stage], laps);
}

/* Returns 1 if the slot for a lap is free: all have read what was in it. */
static int is_free(const shared_memory *s, region_stage readers, uint64_t lap, uint64_t *awaited)
{
    if (lap < region_done_by_all(&s->region, readers) + REGION_DEPTH)
        return 1;
    await(awaited, readers, lap - REGION_DEPTH + 1);
    return 0;
}

/* Returns 1 if all have done a stage of a lap. */
static int is_there(const shared_memory *s, region_stage stage, uint64_t lap, uint64_t *awaited)
{
    if (region_done_by_all(&s->region, stage) > lap)
        return 1;
    await(awaited, stage, lap + 1);
    return 0;
}

/* Advances the entering work by up to one lap: contributes and joins. */
static rc_result step_in(shared_memory *s, int *moved, uint64_t *awaited, rc_error *error)
{
    rc_work *w = s->entering;
    uint64_t contributed = mine(s, REGION_CONTRIBUTED), joined = mine(s, REGION_JOINED);
    if (contributed < end_of(w) && is_free(s, REGION_JOINED, contributed, awaited)) {
        contribute_lap(s, w, contributed);
        *moved = 1;
    }
    if (joined < end_of(w) && is_there(s, REGION_CONTRIBUTED, joined, awaited) &&
        (s->hosts > 1 || is_free(s, REGION_COLLECTED, joined, awaited))) {
        RC_TRY(join_lap(s, w, joined, error));
        *moved = 1;
    }
    return RC_OK;
}

/* Advances the first work by up to one lap: puts its result and collects. */
static void step_out(shared_memory *s, int *moved, uint64_t *awaited)
{
    rc_work *w = s->head;
    uint64_t resulted = mine(s, REGION_RESULTED), collected = mine(s, REGION_COLLECTED);
    int is_result = s->hosts > 1 && w->state == WORK_ON_LINKS && w->receives_left == 1;
    if (is_result && resulted < end_of(w) && is_free(s, REGION_COLLECTED, resulted, awaited)) {
        result_lap(s, w, resulted);
        *moved = 1;
    }
    if (collected < end_of(w) && collected < mine(s, REGION_RESULTED) &&
        (w->shared.chunks == 1 || is_there(s, REGION_RESULTED, collected, awaited))) {
        collect_lap(s, w, collected);
        *moved = 1;
    }
}

static void remove_head(shared_memory *s)
{
    s->head->receives_left--;
    s->head = s->head->shared.next;
    if (s->head == NULL)
        s->tail = NULL;
}

shared_event shared_pump(shared_memory *s, rc_work **w, rc_error *error)
{
    for (int lap = 0; lap < LAPS_PER_PUMP; lap++) {
        uint64_t awaited[REGION_STAGES];
        int moved = 0;
        for (int stage = 0; stage < REGION_STAGES; stage++)
            awaited[stage] = REGION_NOTHING;
        if (s->entering != NULL && step_in(s, &moved, awaited, error) != RC_OK)
            return SHARED_FAILED;
        if (s->head != NULL)
            step_out(s, &moved, awaited);
        region_await(&s->region, awaited);
        *w = s->entering;
        if (*w != NULL && mine(s, REGION_JOINED) == end_of(*w)) {
            shared_note_calls(s);
            s->entering = NULL;
            return SHARED_ENTERED;
        }
        *w = s->head;
        if (*w != NULL && mine(s, REGION_COLLECTED) == end_of(*w)) {
            remove_head(s);
            return SHARED_LEFT;
        }
        if (!moved)
            return SHARED_WAITS;
    }
    return SHARED_BUSY;
}

/* Returns 1 if each rank takes the whole tensor from all who contribute. */
static int takes_whole(const shared_memory *s, const shared_run *run, rc_algorithm wanted)
{
    uint64_t wire_bytes = run->call.count * run->codec.wire_bytes;
    if (run->call.collective != RC_ALLREDUCE)
        return 1;
    return s->hosts == 1 && plan_shares_whole(s->region.ranks, wire_bytes, wanted);
}

void shared_enter(shared_memory *s, rc_work *w, work_env *env)
{
    shared_run *run = &w->shared;
    const kernel_set *kernels = env->engine->kernels;
    uint64_t ranks = (uint64_t)s->region.ranks, room = REGION_SLOT_BYTES;
    *run = (shared_run){.call = w->call, .first = s->laps, .chunks = (uint32_t)ranks};
    rc_call among_ranks = w->call;
    if (s->hosts > 1)
        among_ranks.codec = RC_CODEC_NONE;
    codec_init(&run->codec, kernels, &among_ranks, env->world_size);
    if (s->hosts > 1)
        codec_leave_unfinished(&run->codec);
    if (takes_whole(s, run, env->algorithm))
        run->chunks = 1;
    else
        room = region_part_bytes(&s->region);
    run->chunk_elems = chunk_elems_of(run->call.count, run->chunks);
    run->lap_elems = room / run->codec.wire_bytes / PLAN_ALIGN * PLAN_ALIGN;
    run->laps = (run->chunk_elems + run->lap_elems - 1) / run->lap_elems;
    s->laps += run->laps;
    work_note_start(w);
    w->env = env;
    work_move(w, WORK_IN_MEMORY);
    w->is_shared = 1;
    w->receives_left = 1; /* stands for all laps; the last to be counted down */
    if (s->tail != NULL)
        s->tail->shared.next = w;
    else
        s->head = w;
    s->tail = s->entering = w;
}

void shared_open(shared_memory *s, rc_work *w)
{
    const shared_run *run = &w->shared;
    span own = chunk_of(run, (uint32_t)s->region.self);
    w->call.count = own.count;
    w->call.dst = dst_at(run, own);
    w->call.src = w->call.dst;
}

void shared_drop(shared_memory *s)
{
    s->head = s->tail = s->entering = NULL;
}

void shared_note_calls(const shared_memory *s)
{
    const rc_work *w = s->entering;
    for (int i = 0; w != NULL && i < s->region.ranks; i++) {
        peer_link *ln = w->env->links[s->rank_at[i]];
        if (ln != NULL && region_done_by(&s->region, i, REGION_CONTRIBUTED) > w->shared.first &&
            ln->called <= w->seq)
            ln->called = w->seq + 1;
    }
}

/* shared.c - see shared.h. */
#include "shared.h"

#include "../base/error.h"
#include "../plan/fingerprint.h"

/* The most turns of one call: others want the engine's lock now and then. */
enum { TURNS_PER_PUMP = 16 };

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t mine(const shared_memory *s, region_stage stage)
{
    return region_done_by(&s->region, s->region.self, stage);
}

/* ---- geometry ---- */

/* The elements of a chunk that pass in one turn. */
typedef struct span {
    uint64_t start, count;
} span;

static span span_of(const rc_work *w, uint32_t chunk, uint64_t turn)
{
    const shared_run *run = &w->shared;
    uint64_t within = (turn - run->first) * run->turn_elems;
    uint64_t start = smaller(chunk * run->chunk_elems, w->call.count);
    uint64_t end = smaller(start + run->chunk_elems, w->call.count);
    uint64_t from = smaller(start + within, end);
    return (span){from, smaller(run->turn_elems, end - from)};
}

static const uint8_t *src_at(const rc_work *w, span at)
{
    return (const uint8_t *)w->call.src + at.start * w->codec.elem_bytes;
}

static uint8_t *dst_at(const rc_work *w, span at)
{
    return (uint8_t *)w->call.dst + at.start * w->codec.elem_bytes;
}

/* Where in a rank's contribution a chunk's elements lie. */
static uint8_t *part_at(const shared_memory *s, int rank, uint64_t turn, uint32_t chunk)
{
    return region_contribution(&s->region, rank, turn) + chunk * region_part_bytes(&s->region);
}

/* ---- the three stages of a turn ---- */

static void contribute_turn(shared_memory *s, const rc_work *w, uint64_t turn)
{
    region *r = &s->region;
    region_rank *self = &r->rank[r->self];
    for (uint32_t chunk = 0; chunk < w->shared.chunks; chunk++) {
        span at = span_of(w, chunk, turn);
        if (w->shared.chunks > 1 && (int)chunk == r->self)
            continue;
        codec_encode(&w->codec, part_at(s, r->self, turn, chunk), src_at(w, at), at.count);
        s->bytes += at.count * w->codec.wire_bytes;
    }
    self->call[turn % REGION_DEPTH].seq = w->seq;
    self->call[turn % REGION_DEPTH].fingerprint = w->fingerprint;
    region_advance(r, REGION_CONTRIBUTED);
}

/* Another rank's contribution to this turn is to another call. If it belongs to an earlier or later
 * collective, one of the two called the earlier one otherwise, over links. */
static rc_result mismatch(const shared_memory *s, const rc_work *w, int rank, uint64_t seq,
                          uint64_t fingerprint, rc_error *error)
{
    char here[96] = "something else", there[96];
    uint64_t first = smaller(seq, w->seq);
    if (first == w->seq)
        fingerprint_text(w->fingerprint, here, sizeof here);
    else if (w->seq - first <= s->history_length)
        fingerprint_text(s->history[first % s->history_length], here, sizeof here);
    fingerprint_text(fingerprint, there, sizeof there);
    error_set(error, RC_MISMATCH,
              "ranks differ in collective #%llu: rank %d called %s, rank %d called %s%s",
              (unsigned long long)first, w->env->rank, here, rank,
              seq == first ? "" : "something else, then ", there);
    error->rank = rank;
    error->seq = first;
    return RC_MISMATCH;
}

static rc_result check_calls(const shared_memory *s, const rc_work *w, uint64_t turn,
                             rc_error *error)
{
    for (int i = 0; i < s->region.ranks; i++) {
        const region_rank *other = &s->region.rank[i];
        uint64_t fingerprint = other->call[turn % REGION_DEPTH].fingerprint;
        uint64_t seq = other->call[turn % REGION_DEPTH].seq;
        if (fingerprint != w->fingerprint || seq != w->seq)
            return mismatch(s, w, s->rank_at[i], seq, fingerprint, error);
    }
    return RC_OK;
}

static rc_result join_turn(shared_memory *s, const rc_work *w, uint64_t turn, rc_error *error)
{
    region *r = &s->region;
    const void *wires[REGION_MAX_RANKS];
    int one_shot = w->shared.chunks == 1;
    uint32_t chunk = one_shot ? 0 : (uint32_t)r->self;
    span at = span_of(w, chunk, turn);
    RC_TRY(check_calls(s, w, turn, error));
    for (int i = 0; i < r->ranks; i++)
        wires[i] = i == r->self ? NULL : part_at(s, i, turn, chunk);
    if (one_shot) {
        codec_join(&w->codec, dst_at(w, at), 0, wires, r->ranks, src_at(w, at), at.count);
    } else {
        uint8_t *result = region_result(r, r->self, turn);
        codec_join(&w->codec, result, !codec_stores_plain(&w->codec), wires, r->ranks,
                   src_at(w, at), at.count);
        codec_store(&w->codec, dst_at(w, at), result, at.count);
        s->bytes += at.count * w->codec.wire_bytes;
    }
    region_advance(r, REGION_JOINED);
    return RC_OK;
}

static void collect_turn(shared_memory *s, const rc_work *w, uint64_t turn)
{
    region *r = &s->region;
    uint32_t chunks = w->shared.chunks; /* from the next rank on, so that not all read the same */
    for (uint32_t distance = 1; distance < chunks; distance++) {
        uint32_t chunk = ((uint32_t)r->self + distance) % chunks;
        span at = span_of(w, chunk, turn);
        codec_store(&w->codec, dst_at(w, at), region_result(r, (int)chunk, turn), at.count);
    }
    region_advance(r, REGION_COLLECTED);
}

/* ---- one after the other ---- */

/* Does what can be done of the next turn of each stage; else says what that waits for. */
static rc_result step(shared_memory *s, const rc_work *w, int *moved, rc_error *error)
{
    const region *r = &s->region;
    uint64_t end = w->shared.first + w->shared.turns;
    uint64_t contributed = mine(s, REGION_CONTRIBUTED), joined = mine(s, REGION_JOINED);
    uint64_t collected = mine(s, REGION_COLLECTED);
    uint64_t awaited[REGION_STAGES] = {REGION_NOTHING, REGION_NOTHING, REGION_NOTHING};
    *moved = 0;
    if (contributed < end) {
        if (contributed < region_done_by_all(r, REGION_JOINED) + REGION_DEPTH) {
            contribute_turn(s, w, contributed);
            *moved = 1;
        } else {
            awaited[REGION_JOINED] = contributed - REGION_DEPTH + 1;
        }
    }
    if (joined < end) {
        if (region_done_by_all(r, REGION_CONTRIBUTED) <= joined) {
            awaited[REGION_CONTRIBUTED] = joined + 1;
        } else if (joined >= region_done_by_all(r, REGION_COLLECTED) + REGION_DEPTH) {
            awaited[REGION_COLLECTED] = joined - REGION_DEPTH + 1;
        } else {
            RC_TRY(join_turn(s, w, joined, error));
            *moved = 1;
        }
    }
    if (collected < mine(s, REGION_JOINED)) {
        if (w->shared.chunks == 1 || region_done_by_all(r, REGION_JOINED) > collected) {
            collect_turn(s, w, collected);
            *moved = 1;
        } else {
            awaited[REGION_JOINED] = smaller(awaited[REGION_JOINED], collected + 1);
        }
    }
    region_await(&s->region, awaited);
    return RC_OK;
}

rc_result shared_pump(shared_memory *s, int *more, rc_error *error)
{
    rc_work *w = s->head;
    for (int turn = 0; turn < TURNS_PER_PUMP; turn++) {
        RC_TRY(step(s, w, more, error));
        if (mine(s, REGION_COLLECTED) == w->shared.first + w->shared.turns) {
            shared_note_calls(s);
            w->receives_left = 0;
            s->head = w->shared.next;
            if (s->head == NULL)
                s->tail = NULL;
            return RC_OK;
        }
        if (!*more)
            return RC_OK;
    }
    return RC_OK;
}

void shared_start(shared_memory *s, rc_work *w)
{
    shared_run *run = &w->shared;
    uint64_t room = REGION_SLOT_BYTES;
    *run = (shared_run){.chunks = 1, .chunk_elems = w->call.count, .first = s->turns};
    if (w->plan.algorithm == RC_DIRECT) {
        uint64_t ranks = (uint64_t)s->region.ranks;
        run->chunks = (uint32_t)ranks;
        run->chunk_elems =
            (w->call.count + ranks * PLAN_ALIGN - 1) / (ranks * PLAN_ALIGN) * PLAN_ALIGN;
        room = region_part_bytes(&s->region);
    }
    run->turn_elems = room / w->codec.wire_bytes / PLAN_ALIGN * PLAN_ALIGN;
    run->turns = (run->chunk_elems + run->turn_elems - 1) / run->turn_elems;
    s->turns += run->turns;
    w->receives_left = 1; /* stands for all turns */
    if (s->tail != NULL)
        s->tail->shared.next = w;
    else
        s->head = w;
    s->tail = w;
}

void shared_drop(shared_memory *s)
{
    s->head = s->tail = NULL;
}

void shared_note_calls(const shared_memory *s)
{
    const rc_work *w = s->head;
    for (int i = 0; w != NULL && i < s->region.ranks; i++) {
        peer_link *ln = w->env->links[s->rank_at[i]];
        if (ln != NULL && region_done_by(&s->region, i, REGION_CONTRIBUTED) > w->shared.first &&
            ln->called <= w->seq)
            ln->called = w->seq + 1;
    }
}

/* plan.c - paths, segments and counts of every plan; merges.c has what only plans that merge need.
 * See plan.h. */
#include "plan.h"

#include "merges.h"

/* Segments that a chunk should have, and the least segment. A chunk of fewer segments does not
 * pipeline well, nor spread finely over unequal ports (bench/peers.py --all --rows ports prints
 * what is reached). Smaller segments cost more in frames than they gain. */
enum { WANTED_SEGMENTS = 16, LEAST_SEGMENT_ELEMS = 16384 };
enum { COARSE_WANTED_SEGMENTS = 4, COARSE_LEAST_SEGMENT_ELEMS = 131072 };

static uint64_t round_up(uint64_t value, uint64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t choose_segment(uint64_t chunk_elems, uint64_t wanted, uint64_t least, uint64_t most)
{
    uint64_t elems = round_up((chunk_elems + wanted - 1) / wanted, PLAN_ALIGN);
    return smaller(elems < least ? least : elems, most);
}

void plan_cut_coarsely(plan *p, uint64_t segment_elems)
{
    p->segment_elems = choose_segment(p->chunk_elems, COARSE_WANTED_SEGMENTS,
                                      COARSE_LEAST_SEGMENT_ELEMS, segment_elems);
}

int plan_reads(const rc_call *call, int rank)
{
    switch (call->collective) {
    case RC_BROADCAST:
    case RC_SCATTER: return rank == call->root;
    case RC_BARRIER:
    case RC_RECV: return 0;
    default: return 1;
    }
}

int plan_writes(const rc_call *call, int rank)
{
    switch (call->collective) {
    case RC_REDUCE:
    case RC_GATHER: return rank == call->root;
    case RC_BARRIER:
    case RC_SEND: return 0;
    default: return 1;
    }
}

/* Returns the number of chunks of an all-reduce. */
static uint32_t chunks_of(rc_algorithm algorithm, uint32_t n)
{
    switch (algorithm) {
    case RC_DIRECT:
    case RC_HALVING: return 2 * n * n;
    case RC_ONE_SHOT:
    case RC_DOUBLING: return n * n;
    default: return n;
    }
}

void plan_init(plan *p, const rc_call *call, rc_algorithm algorithm, int rank, int world_size,
               uint64_t segment_elems)
{
    uint64_t n = (uint64_t)world_size;
    *p = (plan){.collective = call->collective,
                .algorithm = algorithm,
                .rank = rank,
                .world_size = world_size,
                .root = call->root,
                .chunk_elems = call->count};
    switch (call->collective) {
    case RC_ALLREDUCE:
        p->chunks = chunks_of(algorithm, (uint32_t)world_size);
        if (algorithm != RC_ONE_SHOT && algorithm != RC_DOUBLING)
            p->chunk_elems = round_up((call->count + n - 1) / n, PLAN_ALIGN);
        p->total_elems = call->count;
        break;
    case RC_REDUCE_SCATTER:
    case RC_ALLGATHER:
    case RC_GATHER:
    case RC_SCATTER:
        p->chunks = (uint32_t)(algorithm == RC_DIRECT ? n * n : n);
        p->total_elems = call->count * n;
        break;
    case RC_ALLTOALL:
    case RC_BARRIER:
        p->chunks = (uint32_t)(n * n);
        p->total_elems = call->count * n * n;
        break;
    case RC_BROADCAST:
    case RC_REDUCE:
    case RC_SEND:
    case RC_RECV:
        p->chunks = 1;
        p->total_elems = call->count;
        break;
    }
    p->segment_elems =
        choose_segment(p->chunk_elems, WANTED_SEGMENTS, LEAST_SEGMENT_ELEMS, segment_elems);
}

uint32_t plan_part(const plan *p, uint32_t chunk)
{
    uint32_t n = (uint32_t)p->world_size;
    switch (p->algorithm) {
    case RC_DIRECT: return chunk < n * n ? chunk % n : chunk / n - n;
    case RC_HALVING: return chunk / n % n;
    case RC_ONE_SHOT:
    case RC_DOUBLING: return 0;
    default: return chunk;
    }
}

uint64_t plan_chunk_elems(const plan *p, uint32_t chunk)
{
    uint64_t start = smaller((uint64_t)plan_part(p, chunk) * p->chunk_elems, p->total_elems);
    return smaller(p->chunk_elems, p->total_elems - start);
}

uint64_t plan_src_offset(const plan *p, uint32_t chunk)
{
    switch (p->collective) {
    case RC_ALLREDUCE:
    case RC_REDUCE_SCATTER: return (uint64_t)plan_part(p, chunk) * p->chunk_elems;
    case RC_SCATTER: return (uint64_t)chunk * p->chunk_elems;
    case RC_ALLTOALL: return chunk % (uint32_t)p->world_size * p->chunk_elems;
    default: return 0;
    }
}

uint64_t plan_dst_offset(const plan *p, uint32_t chunk)
{
    switch (p->collective) {
    case RC_ALLREDUCE: return (uint64_t)plan_part(p, chunk) * p->chunk_elems;
    case RC_ALLGATHER:
    case RC_GATHER: return (uint64_t)chunk * p->chunk_elems;
    case RC_ALLTOALL: return chunk / (uint32_t)p->world_size * p->chunk_elems;
    default: return 0;
    }
}

uint32_t plan_segments(const plan *p, uint32_t chunk)
{
    int says_something =
        p->collective == RC_BARRIER || p->collective == RC_SEND || p->collective == RC_RECV;
    if (says_something && p->total_elems == 0)
        return 1;
    return (uint32_t)((plan_chunk_elems(p, chunk) + p->segment_elems - 1) / p->segment_elems);
}

uint64_t plan_segment_offset(const plan *p, uint32_t segment)
{
    return (uint64_t)segment * p->segment_elems;
}

uint64_t plan_segment_elems(const plan *p, uint32_t chunk, uint32_t segment)
{
    uint64_t elems = plan_chunk_elems(p, chunk);
    return smaller(p->segment_elems, elems - smaller(plan_segment_offset(p, segment), elems));
}

/* Writes sender and receiver of a chunk whose path is a single hop. */
static void ends(const plan *p, uint32_t chunk, int *from, int *to)
{
    uint32_t n = (uint32_t)p->world_size;
    if (plan_merges(p)) {
        merges_ends(p, chunk, from, to);
        return;
    }
    switch (p->collective) {
    case RC_GATHER: *from = (int)chunk, *to = p->root; break;
    case RC_SCATTER: *from = p->root, *to = (int)chunk; break;
    case RC_SEND: *from = p->rank, *to = p->root; break;
    case RC_RECV: *from = p->root, *to = p->rank; break;
    default: *from = (int)(chunk / n % n), *to = (int)(chunk % n); break;
    }
}

uint32_t plan_hops(const plan *p, uint32_t chunk)
{
    uint32_t around = (uint32_t)p->world_size - 1;
    int from, to;
    if (p->algorithm != RC_RING) {
        ends(p, chunk, &from, &to);
        return from != to;
    }
    switch (p->collective) {
    case RC_ALLREDUCE: return 2 * around;
    case RC_REDUCE_SCATTER:
    case RC_ALLGATHER:
    case RC_BROADCAST:
    case RC_REDUCE: return around;
    default: ends(p, chunk, &from, &to); return from != to;
    }
}

uint32_t plan_reduce_hops(const plan *p)
{
    switch (p->collective) {
    case RC_ALLREDUCE:
    case RC_REDUCE_SCATTER:
    case RC_REDUCE: return p->algorithm == RC_RING ? (uint32_t)p->world_size - 1 : 0;
    default: return 0;
    }
}

plan_action plan_action_at(const plan *p, uint32_t chunk, uint32_t step)
{
    if (plan_merges(p))
        return merges_brings_result(p, chunk) ? PLAN_STORE : PLAN_MERGE;
    if (p->algorithm != RC_RING)
        return plan_is_given(p, chunk) ? PLAN_JOIN : PLAN_STORE;
    return step < plan_reduce_hops(p) ? PLAN_REDUCE : PLAN_STORE;
}

int plan_is_given(const plan *p, uint32_t chunk)
{
    uint32_t n = (uint32_t)p->world_size;
    if (plan_merges(p))
        return merges_is_given(p, chunk);
    return p->algorithm != RC_DIRECT || chunk < n * n;
}

uint32_t plan_result_chunk(const plan *p, int to)
{
    uint32_t n = (uint32_t)p->world_size;
    return n * n + (uint32_t)p->rank * n + (uint32_t)to;
}

int plan_rank_at(const plan *p, uint32_t chunk, uint32_t position)
{
    uint32_t n = (uint32_t)p->world_size;
    int from, to;
    if (p->algorithm != RC_RING) {
        ends(p, chunk, &from, &to);
        return position == 0 ? from : to;
    }
    switch (p->collective) {
    case RC_ALLREDUCE:
    case RC_ALLGATHER: return (int)((chunk + position) % n);
    case RC_REDUCE_SCATTER: return (int)((chunk + 1 + position) % n);
    case RC_BROADCAST: return (int)(((uint32_t)p->root + position) % n);
    case RC_REDUCE: return (int)(((uint32_t)p->root + 1 + position) % n);
    default: ends(p, chunk, &from, &to); return position == 0 ? from : to;
    }
}

uint32_t plan_initial_chunks(const plan *p, uint32_t *first)
{
    uint32_t n = (uint32_t)p->world_size, rank = (uint32_t)p->rank;
    int all_pairs = p->collective == RC_ALLTOALL || p->collective == RC_BARRIER;
    *first = 0;
    if (p->algorithm != RC_RING || all_pairs) {
        *first = rank * n;
        return n;
    }
    switch (p->collective) {
    case RC_BROADCAST: return p->rank == p->root ? 1 : 0;
    case RC_REDUCE: return p->rank == (p->root + 1) % p->world_size ? 1 : 0;
    case RC_SCATTER: return p->rank == p->root ? n : 0;
    case RC_SEND: return 1;
    case RC_RECV: return 0;
    case RC_REDUCE_SCATTER: *first = (rank + n - 1) % n; return 1;
    default: *first = rank; return 1;
    }
}

uint32_t plan_local_copy_chunk(const plan *p)
{
    uint32_t n = (uint32_t)p->world_size, rank = (uint32_t)p->rank;
    int at_root = p->rank == p->root;
    if (p->algorithm != RC_RING)
        return PLAN_NO_CHUNK;
    switch (p->collective) {
    case RC_ALLGATHER: return rank;
    case RC_ALLTOALL: return rank * n + rank;
    case RC_BROADCAST: return at_root ? 0 : PLAN_NO_CHUNK;
    case RC_GATHER:
    case RC_SCATTER: return at_root ? rank : PLAN_NO_CHUNK;
    default: return n == 1 ? 0 : PLAN_NO_CHUNK;
    }
}

/* ---- counts of frames ---- */

/* Counts the frames that a rank sends another, in plans of single hops. */
static inline uint64_t frames_between(const plan *p, int from, int to)
{
    uint32_t n = (uint32_t)p->world_size, pair = (uint32_t)from * n + (uint32_t)to;
    if (from == to)
        return 0;
    if (p->algorithm == RC_DIRECT && p->collective == RC_ALLREDUCE)
        return plan_segments(p, pair) + plan_segments(p, n * n + pair);
    if (p->algorithm != RC_RING)
        return plan_segments(p, pair);
    switch (p->collective) {
    case RC_GATHER: return to == p->root ? plan_segments(p, (uint32_t)from) : 0;
    case RC_SCATTER: return from == p->root ? plan_segments(p, (uint32_t)to) : 0;
    case RC_SEND: return from == p->rank && to == p->root ? plan_segments(p, 0) : 0;
    case RC_RECV: return from == p->root && to == p->rank ? plan_segments(p, 0) : 0;
    default: return plan_segments(p, pair);
    }
}

/* Counts the hops of a path around the ring that leave the rank `behind` places after its first. */
static uint64_t passes(uint32_t hops, uint32_t n, uint32_t behind)
{
    return behind < hops ? (hops - behind + n - 1) / n : 0;
}

/* Counts the frames that a rank sends the next one, where paths go around. */
static uint64_t frames_around(const plan *p, uint32_t rank)
{
    uint32_t n = (uint32_t)p->world_size;
    uint64_t frames = 0;
    for (uint32_t chunk = 0; chunk < p->chunks; chunk++) {
        uint32_t first = (uint32_t)plan_rank_at(p, chunk, 0);
        frames += plan_segments(p, chunk) * passes(plan_hops(p, chunk), n, (rank + n - first) % n);
    }
    return frames;
}

/* Counts the frames that are merged with a peer, or with all (-1): as many are sent as come. */
static uint64_t frames_merged(const plan *p, int peer)
{
    uint64_t frames = 0;
    uint32_t chunks_between = p->algorithm == RC_HALVING ? (uint32_t)p->world_size : 0;
    for (uint32_t part = 0; part < plan_parts(p); part++)
        frames +=
            (uint64_t)merges_meetings(p, part, peer) * plan_segments(p, part * chunks_between);
    return frames;
}

static inline uint64_t count_frames(const plan *p, int peer, int sends)
{
    int n = p->world_size, rank = p->rank;
    if (p->algorithm == RC_RING && p->collective <= RC_REDUCE) { /* each rank sends to the next */
        int before = (rank + n - 1) % n, neighbour = sends ? (rank + 1) % n : before;
        if (n == 1 || (peer >= 0 && peer != neighbour))
            return 0;
        return frames_around(p, (uint32_t)(sends ? rank : before));
    }
    if (peer >= 0)
        return sends ? frames_between(p, rank, peer) : frames_between(p, peer, rank);
    uint64_t frames = 0;
    for (int other = 0; other < n; other++)
        frames += sends ? frames_between(p, rank, other) : frames_between(p, other, rank);
    return frames;
}

uint64_t plan_receives(const plan *p, int peer)
{
    return plan_merges(p) ? frames_merged(p, peer) : count_frames(p, peer, 0);
}

uint64_t plan_sends(const plan *p, int peer)
{
    return plan_merges(p) ? frames_merged(p, peer) : count_frames(p, peer, 1);
}

int plan_starts_towards(const plan *p, int peer)
{
    uint32_t first = 0, count = plan_merges(p) ? plan_parts(p) : plan_initial_chunks(p, &first);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t chunk = plan_merges(p) ? plan_send_after_turns(p, i, 0) : first + i;
        if (chunk != PLAN_NO_CHUNK && plan_hops(p, chunk) > 0 && plan_segments(p, chunk) > 0 &&
            plan_rank_at(p, chunk, 1) == peer)
            return 1;
    }
    return 0;
}

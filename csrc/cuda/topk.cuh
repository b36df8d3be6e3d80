/* topk.cuh - the codec that sends the largest elements as they are (codec/topk.h). A part of
 * kernels.cu, by its words and rules; sums stay on the host.
 *
 * First the threshold, from a sample of the tensor (topk.c has its geometry: so many runs of run
 * elements, size in all; or, if size is count - exact_count, all of it). kept: density * size,
 * rounded. threshold[0] becomes the smallest size that is sent, threshold[1] says whether many
 * elements have it. (A density of 1 needs no sample: 1 and 0.)
 *
 *   ringcomm_sample_topk(float *sample, const float *src, const float *residual, u64 size, u64 run,
 *                        u64 count, u64 exact, u64 exact_count, u64 turn)
 *   ringcomm_least_topk(u32 *threshold, const float *sample, u64 size, u64 kept)
 *
 * Then the payloads. A tensor has parts of part elements (the last ones may have fewer, or none),
 * each of each segments, of segment elements but for the last ones; a segment is at most 65536. The
 * payload of segment k of part p is at wire + s * stride, s = p * each + k, and has kept[s]
 * elements, at most cap, for which a stride has room. Of part own (none: ~0) nothing is packed, and
 * kept is 0. left may be NULL, residual or src. turn is the number of the call. To unpack, payloads
 * must be valid (topk_valid). *poisoned is set to 1 if an element is not finite, and else not
 * touched.
 *
 *   ringcomm_pack_topk(u8 *wire, u32 *kept, float *left, const float *src, const float *residual,
 *                      u64 n, u64 part, u64 each, u64 segment, u64 stride, u64 own,
 *                      const u32 *threshold, double density, u32 cap, u64 turn, u32 *poisoned)
 *   ringcomm_unpack_topk(float *dst, const u8 *wire, const u32 *kept, u64 n, u64 part, u64 each,
 *                        u64 segment, u64 stride, u32 *poisoned)
 *
 * One block has a segment, or the sample. It reads a segment twice, the second time to put what it
 * counted in order; and four times more if there is more than the limit, to find the largest.
 */

enum { DIGITS = 2048, MOST_WARPS = 8 };

/* What is left of a NaN, on a processor: its payload. */
DEVICE float sum_of_two(float x, float y)
{
    const float sum = add(x, y);
    if (sum == sum)
        return sum;
    if (x == x && y == y)
        return THE_NAN;
    return float_of(bits_of(x == x ? y : x) | 0x400000);
}

DEVICE float summed(const float *src, const float *residual, u64 i)
{
    return residual ? sum_of_two(src[i], residual[i]) : src[i];
}

DEVICE u32 size_of(float x)
{
    return bits_of(x) & MAGNITUDE;
}

/* ---- the sample ---- */

DEVICE u64 hashed(u64 x)
{
    x += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

/* Where a run of the sample begins, among n elements. */
DEVICE u64 run_at(u64 number, u64 runs, u64 length, u64 n, u64 turn)
{
    const u64 start = n / runs * number + n % runs * number / runs;
    const u64 end = n / runs * (number + 1) + n % runs * (number + 1) / runs;
    return start + hashed(hashed(turn) + number) % (end - start - length + 1);
}

KERNEL ringcomm_sample_topk(float *sample, const float *src, const float *residual, u64 size,
                            u64 run, u64 count, u64 exact, u64 exact_count, u64 turn)
{
    const u64 n = count - exact_count;
    for (u64 i = THIS_THREAD; i < size; i += ALL_THREADS) {
        u64 at = size == n ? i : run_at(i / run, size / run, run, n, turn) + i % run;
        if (at >= exact)
            at += exact_count;
        sample[i] = summed(src, residual, at);
    }
}

/* ---- the k-th largest ---- */

typedef struct place {
    u32 size;   /* of the k-th largest */
    u32 larger; /* elements that are */
    u32 equal;  /* of that size */
} place;

/* The bin of the k-th from the top; *k becomes its number within it. By one warp. */
DEVICE u32 bin_of(const u32 *counts, u32 *k, u32 lane)
{
    enum { EACH = DIGITS / WARP };
    u32 own = 0, above = 0;
#pragma unroll 1
    for (u32 i = 0; i < EACH; i++)
        own += counts[lane * EACH + i];
#pragma unroll 1
    for (u32 from = 1; from < WARP; from++) {
        const u32 other = __shfl_sync(ALL_LANES, own, (int)((lane + from) % WARP));
        above += lane + from < WARP ? other : 0;
    }
    const u32 mine = __ballot_sync(ALL_LANES, above < *k && above + own >= *k);
    u32 bin = lane * EACH + EACH - 1, left = *k - above;
    if (mine >> lane & 1)
        for (; counts[bin] < left; bin--)
            left -= counts[bin];
    const int owner = 31 - __clz((int)mine);
    *k = __shfl_sync(ALL_LANES, left, owner);
    return __shfl_sync(ALL_LANES, bin, owner);
}

/* Among elements whose size is least or more, of which there are k: their 31 bits from the top on,
 * 11, 10 and 10 of them. By a whole block. */
DEVICE place kth_largest(const float *src, const float *residual, u64 n, u32 least, u32 k)
{
    __shared__ u32 counts[DIGITS];
    __shared__ u32 found[2];
    u32 known = 0, within = k;
#pragma unroll 1
    for (int shift = 20; shift >= 0; shift -= 10) {
        for (u32 i = threadIdx.x; i < DIGITS; i += blockDim.x)
            counts[i] = 0;
        __syncthreads();
        for (u64 i = threadIdx.x; i < n; i += blockDim.x) {
            const u32 size = size_of(summed(src, residual, i));
            if (size >= least && (shift == 20 || size >> (shift + 10) == known))
                atomicAdd(&counts[size >> shift & (shift == 20 ? 2047 : 1023)], 1u);
        }
        __syncthreads();
        if (threadIdx.x < WARP) {
            const u32 bin = bin_of(counts, &within, threadIdx.x);
            found[0] = bin;
            found[1] = within;
        }
        __syncthreads();
        known = shift == 20 ? found[0] : known << 10 | found[0];
        within = found[1];
    }
    place p;
    p.size = known;
    p.larger = k - within;
    p.equal = counts[known & 1023];
    __syncthreads();
    return p;
}

KERNEL ringcomm_least_topk(u32 *threshold, const float *sample, u64 size, u64 kept)
{
    if (blockIdx.x != 0 || size == 0)
        return;
    const u32 k = kept > 0 ? (u32)kept : 1;
    const place p = kth_largest(sample, 0, size, 0, k);
    if (threadIdx.x == 0) {
        threshold[0] = p.size > 0 ? p.size : 1;
        threshold[1] = p.size > 0 && p.larger + p.equal > kept + kept / 4 + 8;
    }
}

/* ---- payloads ---- */

/* Which elements are a segment's. */
typedef struct extent {
    u64 start;
    u32 length;
} extent;

DEVICE extent extent_of(u64 s, u64 n, u64 part, u64 each, u64 segment)
{
    const u64 first = s / each * part, end = n - first < part ? n : first + part;
    extent e;
    e.start = first + s % each * segment;
    e.length = 0;
    if (e.start < end)
        e.length = (u32)(end - e.start < segment ? end - e.start : segment);
    return e;
}

/* What a warp has of a segment, and what the warps before it have of what is sent. */
typedef struct stretch {
    u32 start, end;
} stretch;

typedef struct tally {
    u32 larger, equal; /* than the threshold */
} tally;

DEVICE stretch stretch_of(u32 warp, u32 n)
{
    const u32 each = (n / (blockDim.x / WARP) + WARP) / WARP * WARP;
    stretch s;
    s.start = warp * each < n ? warp * each : n;
    s.end = s.start + each < n ? s.start + each : n;
    return s;
}

/* Counts what is larger than least, and as large; sums[0] of all, sums[1] of the warps before. By a
 * whole block. */
DEVICE void count(tally sums[2], const float *src, const float *residual, u32 n, u32 least)
{
    __shared__ tally warps[MOST_WARPS];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const stretch own = stretch_of(warp, n);
    tally t;
    t.larger = t.equal = 0;
#pragma unroll 4
    for (u32 i = own.start + lane; i < own.end; i += WARP) {
        const u32 size = size_of(summed(src, residual, i));
        t.larger += size > least;
        t.equal += size == least;
    }
    for (u32 by = WARP / 2; by; by /= 2) {
        t.larger += __shfl_xor_sync(ALL_LANES, t.larger, (int)by);
        t.equal += __shfl_xor_sync(ALL_LANES, t.equal, (int)by);
    }
    if (lane == 0)
        warps[warp] = t;
    __syncthreads();
    sums[0].larger = sums[0].equal = sums[1].larger = sums[1].equal = 0;
    for (u32 i = 0; i < blockDim.x / WARP; i++) {
        sums[0].larger += warps[i].larger;
        sums[0].equal += warps[i].equal;
        sums[1].larger += i < warp ? warps[i].larger : 0;
        sums[1].equal += i < warp ? warps[i].equal : 0;
    }
    __syncthreads();
}

/* The most elements of a segment: limit and bounded of codec/topk.c. */
DEVICE u32 limit_of(double density, int tied, u32 n, u32 cap)
{
    const double share = __dmul_rn(density, (double)n);
    const u64 most = tied ? __double2ull_ru(share) : __double2ull_ru(__dmul_rn(8.0, share)) + 32;
    const u32 bound = n < cap ? n : cap;
    return most < bound ? (u32)most : bound;
}

/* Which of the elements of the threshold's size go: wanted of them, from the first on, all around.
 */
typedef struct ring {
    u32 first, wanted, equal;
} ring;

/* Of so many in order, how many go. */
DEVICE u32 going(const ring *r, u32 before)
{
    const u32 end = r->first + r->wanted;
    const u32 around = end > r->equal ? end - r->equal : 0;
    const u32 stop = end < r->equal ? end : r->equal;
    const u32 until = before < stop ? before : stop;
    return (before < around ? before : around) + (until > r->first ? until - r->first : 0);
}

DEVICE void put_value(u8 *payload, u32 kept, u32 at, float value)
{
    u16 *halves = (u16 *)(payload + 2 * (u64)kept + 4 * (u64)at);
    halves[0] = (u16)bits_of(value);
    halves[1] = (u16)(bits_of(value) >> 16);
}

/* Those that go, in order. By a whole block; each lane reads an element before it writes it. */
DEVICE void emit(u8 *payload, u32 kept, float *left, const float *src, const float *residual, u32 n,
                 u32 least, const ring *r, tally before, u32 *poisoned)
{
    const u32 lane = threadIdx.x % WARP, lower = (1u << lane) - 1;
    const stretch own = stretch_of(threadIdx.x / WARP, n);
    u32 equals = before.equal, at = before.larger + going(r, before.equal);
    for (u32 start = own.start; start < own.end; start += WARP) {
        const u32 i = start + lane;
        const int exists = i < own.end;
        const float c = exists ? summed(src, residual, i) : 0.0f;
        const int equal = exists && size_of(c) == least;
        const u32 all_equal = __ballot_sync(ALL_LANES, equal);
        const u32 number = equals + (u32)__popc(all_equal & lower);
        const int goes = (exists && size_of(c) > least) ||
                         (equal && (number + r->equal - r->first) % r->equal < r->wanted);
        const u32 all_going = __ballot_sync(ALL_LANES, goes);
        if (goes) {
            const u32 to = at + (u32)__popc(all_going & lower);
            ((u16 *)payload)[to] = (u16)i;
            put_value(payload, kept, to, c);
            if (!is_finite(c))
                *poisoned = 1;
        }
        if (left && exists)
            left[i] = goes ? 0.0f : c;
        equals += (u32)__popc(all_equal);
        at += (u32)__popc(all_going);
    }
}

KERNEL ringcomm_pack_topk(u8 *wire, u32 *kept, float *left, const float *src, const float *residual,
                          u64 n, u64 part, u64 each, u64 segment, u64 stride, u64 own,
                          const u32 *threshold, double density, u32 cap, u64 turn, u32 *poisoned)
{
    for (u64 s = blockIdx.x; n > 0 && s / each * part < n; s += gridDim.x) {
        const extent e = extent_of(s, n, part, each, segment);
        const u64 start = e.start;
        const u32 length = s / each == own ? 0 : e.length;
        const u32 most = limit_of(density, threshold[1] != 0, length, cap);
        const float *x = src + start, *rest = residual ? residual + start : 0;
        u32 least = threshold[0];
        tally sums[2]; /* of all warps, of those before */
        ring r;
        count(sums, x, rest, length, least);
        r.first = 0;
        r.equal = r.wanted = sums[0].equal;
        if (sums[0].larger + sums[0].equal > most) {
            const place last = kth_largest(x, rest, length, least, most);
            least = last.size;
            count(sums, x, rest, length, least);
            r.first = (u32)(hashed(turn) % last.equal);
            r.equal = last.equal;
            r.wanted = most - last.larger;
        }
        const u32 all = sums[0].larger + r.wanted;
        if (threadIdx.x == 0)
            kept[s] = all;
        emit(wire + s * stride, all, left ? left + start : 0, x, rest, length, least, &r, sums[1],
             poisoned);
    }
}

KERNEL ringcomm_unpack_topk(float *dst, const u8 *wire, const u32 *kept, u64 n, u64 part, u64 each,
                            u64 segment, u64 stride, u32 *poisoned)
{
    for (u64 s = blockIdx.x; n > 0 && s / each * part < n; s += gridDim.x) {
        const extent e = extent_of(s, n, part, each, segment);
        const u16 *index = (const u16 *)(wire + s * stride);
        const u16 *halves = index + kept[s];
        float *out = dst + e.start;
        for (u32 i = threadIdx.x; i < e.length; i += blockDim.x)
            out[i] = 0.0f;
        __syncthreads();
        for (u32 i = threadIdx.x; i < kept[s]; i += blockDim.x) {
            const float value = float_of(halves[2 * i] | (u32)halves[2 * i + 1] << 16);
            out[index[i]] = value;
            if (!is_finite(value))
                *poisoned = 1;
        }
    }
}

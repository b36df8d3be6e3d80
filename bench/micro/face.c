/* face.c - what the micro-benchmarks call: inner functions of the core, many times per call.
 *
 * Problem. A header or a plan takes nanoseconds, a call from Python a microsecond, and the
 * extension exports neither. Design. Each function here repeats one of the core's; built with the
 * core's own flags, without link-time optimization, so no repetition can be left out.
 */
#include <stdint.h>
#include <string.h>

#include "../../csrc/base/copy.h"
#include "../../csrc/base/crc32c.h"
#include "../../csrc/kernels/kernels.h"
#include "../../csrc/net/frame.h"
#include "../../csrc/plan/plan.h"

#define FACE __attribute__((visibility("default")))

enum { BF16_ENCODE, BF16_DECODE, BF16_ADD, FP16_ENCODE, FP16_DECODE, FP16_ADD, F32_ADD, COPY };

/* Name of the i-th kernel set that this CPU runs; NULL past the last. */
FACE const char *face_set(int i)
{
    const kernel_set *set;
    for (int at = 0; (set = kernels_at(at)); at++)
        if (set->supported() && i-- == 0)
            return set->name;
    return NULL;
}

/* dst, f: n floats; h: n 16-bit floats. */
FACE int face_kernel(const char *name, int which, float *dst, const float *f, uint16_t *h, size_t n,
                     int repeats)
{
    const kernel_set *set = kernels_find(name);
    if (!set)
        return 0;
    const kernel_half *half = which < FP16_ENCODE ? &set->bf16 : &set->fp16;
    for (int i = 0; i < repeats; i++)
        switch (which) {
        case BF16_ENCODE:
        case FP16_ENCODE: half->encode(h, f, 1.0f, n); break;
        case BF16_DECODE:
        case FP16_DECODE: half->decode(dst, h, n); break;
        case BF16_ADD:
        case FP16_ADD: half->add(h, h, f, 1.0f, 1.0f, n); break;
        case F32_ADD: set->reduce[RC_F32][RC_SUM](dst, dst, f, n); break;
        default: memcpy(dst, f, n * sizeof *f); __asm__ volatile("" : : "r"(dst) : "memory");
        }
    return 1;
}

/* Fills dst piece by piece out of so few pieces that they stay in a cache. */
FACE void face_collect(int which, uint8_t *dst, const uint8_t *slots, size_t n)
{
    enum { PIECE = 32 << 10, SLOTS = 8, MEMCPY = 0, PAST_CACHE = 2 };
    for (size_t at = 0; at + PIECE <= n; at += PIECE) {
        const uint8_t *src = slots + at / PIECE % SLOTS * PIECE;
        if (which == MEMCPY)
            memcpy(dst + at, src, PIECE);
        else if (which == PAST_CACHE)
            copy_past_cache(dst + at, src, PIECE);
        else
            copy_bytes(dst + at, src, PIECE);
        __asm__ volatile("" : : "r"(dst) : "memory");
    }
}

FACE int face_crc_methods(void)
{
    return crc32c_methods();
}

FACE uint32_t face_crc(int method, const void *data, size_t n, int repeats)
{
    uint32_t crc = 0;
    for (int i = 0; i < repeats; i++)
        crc = crc32c_by(method, crc, data, n);
    return crc;
}

FACE uint32_t face_frame_encode(uint8_t *bytes, const void *payload, uint32_t length, int repeats)
{
    frame_header h = {.type = FRAME_DATA, .epoch = 7, .fingerprint = 99, .length = length};
    for (int i = 0; i < repeats; i++) {
        h.seq = (uint64_t)i;
        frame_encode(bytes, &h, payload);
    }
    return bytes[0];
}

/* 1 if the frame is whole every time. */
FACE int face_frame_decode(const uint8_t *bytes, const void *payload, int repeats)
{
    frame_header h;
    uint32_t crc;
    int good = 1;
    for (int i = 0; i < repeats; i++)
        good &= frame_decode(bytes, 7, 4 << 20, &h, &crc, NULL) == RC_OK &&
                frame_check(payload, h.length, crc);
    return good;
}

static rc_call allreduce_of(uint64_t count)
{
    return (rc_call){.size = sizeof(rc_call), .dtype = RC_F32, .count = count};
}

FACE int face_choose(uint64_t count, int world_size, int repeats)
{
    int sum = 0;
    for (int i = 0; i < repeats; i++) {
        rc_call call = allreduce_of(count + (uint64_t)i);
        sum += (int)plan_choose(&call, world_size, 4 * call.count, 0, RC_AUTO);
    }
    return sum;
}

FACE uint64_t face_plan_init(uint64_t count, int world_size, int repeats)
{
    uint64_t sum = 0;
    for (int i = 0; i < repeats; i++) {
        rc_call call = allreduce_of(count + (uint64_t)i);
        plan p;
        plan_init(&p, &call, RC_RING, 0, world_size, 65536);
        sum += p.segment_elems;
    }
    return sum;
}

/* What is asked for every segment that a rank handles; returns how many there were. */
FACE uint64_t face_plan_walk(uint64_t count, int world_size, uint64_t *sum)
{
    rc_call call = allreduce_of(count);
    plan p;
    plan_init(&p, &call, RC_RING, 0, world_size, 65536);
    uint64_t asked = 0;
    for (uint32_t chunk = 0; chunk < p.chunks; chunk++)
        for (uint32_t step = 0; step < plan_hops(&p, chunk); step++)
            for (uint32_t segment = 0; segment < plan_segments(&p, chunk); segment++, asked++)
                *sum += plan_segment_offset(&p, segment) + plan_segment_elems(&p, chunk, segment) +
                        (uint64_t)plan_action_at(&p, chunk, step) +
                        (uint64_t)plan_rank_at(&p, chunk, step + 1) + plan_dst_offset(&p, chunk);
    return asked;
}

/* core.c - what the emulated kernels are held to, for a test that is not C: the core's scalar
 * kernel set, which tests/c holds all others to, and the payloads that works make by it.
 */
#include <stddef.h>
#include <stdint.h>

#include "../../csrc/codec/codec.h"
#include "../../csrc/kernels/kernels.h"

#define EXPORT __attribute__((visibility("default")))

static const kernel_set *const kernels = &kernels_scalar;

static const kernel_half *half_of(int codec)
{
    return codec == RC_CODEC_BF16 ? &kernels->bf16 : &kernels->fp16;
}

static const kernel_block *block_of(int codec)
{
    return &kernels->block[codec];
}

EXPORT void core_pack_half(int codec, uint16_t *wire, const float *src, float pre, size_t n)
{
    half_of(codec)->encode(wire, src, pre, n);
}

EXPORT void core_unpack_half(int codec, float *dst, const uint16_t *wire, size_t n)
{
    half_of(codec)->decode(dst, wire, n);
}

EXPORT void core_scale(float *dst, const float *src, float factor, size_t n)
{
    kernels->scale[RC_F32](dst, src, (double)factor, n);
}

/* One segment. */
EXPORT void core_pack(int codec, uint8_t *wire, const float *src, size_t n)
{
    const kernel_block *format = block_of(codec);
    uint8_t *codes = wire + kernel_block_scales(format, n) * sizeof(uint16_t);
    format->encode((uint16_t *)(void *)wire, codes, NULL, src, 1.0F, NULL, n, 0);
}

EXPORT void core_unpack(int codec, float *dst, const uint8_t *wire, size_t n)
{
    const kernel_block *format = block_of(codec);
    const uint8_t *codes = wire + kernel_block_scales(format, n) * sizeof(uint16_t);
    format->decode(dst, (const uint16_t *)(const void *)wire, codes, n, 0);
}

/* The sum of two payloads of one segment. */
EXPORT void core_add(int codec, float *dst, const uint8_t *first, const uint8_t *second, int op,
                     size_t n)
{
    const rc_call call = {.codec = (rc_codec)codec, .dtype = RC_F32, .op = (rc_op)op, .count = n};
    const void *wires[] = {first, second};
    const quant_terms terms = {.wires = wires, .count = 2};
    int ignored = 0;
    quant q;
    quant_init(&q, kernels, &call, 2);
    quant_join(&q, dst, &terms, n, &ignored);
}

/* The payload of one segment as a work makes it, and takes it; returns its bytes. */
EXPORT size_t core_payload(int codec, uint8_t *wire, const float *src, size_t n, int *poisoned)
{
    const rc_call call = {.codec = (rc_codec)codec, .dtype = RC_F32, .count = n};
    quant q;
    quant_init(&q, kernels, &call, 2);
    quant_encode(&q, wire, src, NULL, NULL, n, poisoned);
    return quant_bytes(&q, n);
}

EXPORT void core_store(int codec, float *dst, const uint8_t *wire, size_t n, int *poisoned)
{
    const rc_call call = {.codec = (rc_codec)codec, .dtype = RC_F32, .count = n};
    quant q;
    quant_init(&q, kernels, &call, 2);
    quant_store(&q, dst, wire, n, poisoned);
}

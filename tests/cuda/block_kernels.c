/* block_kernels.c - what kernels.cu does of codecs, by the core's scalar set: for tests
 * of csrc/pipe under sanitizers, which do not go together with emulate.c. (That they give the same
 * bits is shown by tests/test_cuda_kernels.py.) For small_kernels.c.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "../../csrc/kernels/kernels.h"
#include "block_kernels.h"

static const kernel_block *format_of(const char *name)
{
    const kernel_set *set = &kernels_scalar;
    static const char *const names[] = {"int8", "int4", "onebit", "fp8"};
    const kernel_block *const formats[] = {&set->int8, &set->int4, &set->onebit, &set->fp8};
    for (int i = 0; i < 4; i++)
        if (strcmp(name, names[i]) == 0)
            return formats[i];
    return NULL;
}

/* Where an argument points to, from index on. */
static float *floats(const arguments *a, int which, uint64_t index)
{
    float *at = a->at(a->params[which]);
    return at != NULL ? at + index : NULL;
}

static void pack(const kernel_block *format, const arguments *a, uint64_t n, uint64_t segment,
                 uint64_t stride)
{
    for (uint64_t at = 0, k = 0; at < n; at += segment, k++) {
        uint64_t count = n - at < segment ? n - at : segment;
        uint8_t *wire = (uint8_t *)a->at(a->params[0]) + k * stride;
        uint8_t *codes = wire + kernel_block_scales(format, count) * sizeof(uint16_t);
        format->encode((uint16_t *)(void *)wire, codes, NULL, floats(a, 1, at), 1.0F, NULL, count,
                       0);
    }
}

static void unpack(const kernel_block *format, const arguments *a, uint64_t n, uint64_t segment,
                   uint64_t stride)
{
    for (uint64_t at = 0, k = 0; at < n; at += segment, k++) {
        uint64_t count = n - at < segment ? n - at : segment;
        const uint8_t *wire = (const uint8_t *)a->at(a->params[1]) + k * stride;
        const uint8_t *codes = wire + kernel_block_scales(format, count) * sizeof(uint16_t);
        format->decode(floats(a, 0, at), (const uint16_t *)(const void *)wire, codes, count, 0);
    }
}

static void add(const kernel_block *format, const arguments *a, uint64_t n, uint64_t segment,
                uint64_t stride)
{
    uint64_t apart;
    float post;
    memcpy(&apart, a->params[2], sizeof apart);
    memcpy(&post, a->params[3], sizeof post);
    for (uint64_t at = 0, k = 0; at < n; at += segment, k++) {
        uint64_t count = n - at < segment ? n - at : segment;
        const uint8_t *first = (const uint8_t *)a->at(a->params[1]) + k * stride;
        const uint8_t *second = first + apart;
        uint64_t scales = kernel_block_scales(format, count) * sizeof(uint16_t);
        float *dst = floats(a, 0, at);
        format->decode(dst, (const uint16_t *)(const void *)first, first + scales, count, 0);
        format->add(dst, (const uint16_t *)(const void *)second, second + scales, count);
        for (uint64_t i = 0; i < count; i++)
            dst[i] *= post;
    }
}

/* Of 16 bits; 1 if the codec is one. */
static int run_half(const char *codec, const char *kind, const arguments *a)
{
    const kernel_half *half =
        strcmp(codec, "bf16") == 0 ? &kernels_scalar.bf16 : &kernels_scalar.fp16;
    int packs = strcmp(kind, "pack") == 0;
    float pre;
    uint64_t n;
    if (strcmp(codec, "bf16") != 0 && strcmp(codec, "fp16") != 0)
        return 0;
    memcpy(&n, a->params[packs ? 3 : 2], sizeof n);
    memcpy(&pre, a->params[2], sizeof pre);
    if (n > 0 && packs)
        half->encode(a->at(a->params[0]), a->at(a->params[1]), pre, n);
    else if (n > 0)
        half->decode(a->at(a->params[0]), a->at(a->params[1]), n);
    return 1;
}

int block_kernels_launch(const char *name, const arguments *a)
{
    static const struct {
        const char *name;
        void (*run)(const kernel_block *format, const arguments *a, uint64_t n, uint64_t segment,
                    uint64_t stride);
        int sizes; /* where n, segment and stride are among the parameters */
    } kinds[] = {{"pack", pack, 2}, {"unpack", unpack, 2}, {"add", add, 4}};
    char kind[16], codec[16];
    if (sscanf(name, "ringcomm_%15[a-z]_%15s", kind, codec) != 2)
        return 0;
    if (run_half(codec, kind, a))
        return 1;
    const kernel_block *format = format_of(codec);
    for (int i = 0; i < 3 && format != NULL; i++) {
        uint64_t three[3];
        if (strcmp(kind, kinds[i].name) != 0)
            continue;
        for (int j = 0; j < 3; j++)
            memcpy(&three[j], a->params[kinds[i].sizes + j], sizeof three[j]);
        if (three[0] > 0)
            kinds[i].run(format, a, three[0], three[1], three[2]);
        return 1;
    }
    return 0;
}

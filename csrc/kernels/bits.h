/* bits.h - conversions between a float and its bits. */
#ifndef RINGCOMM_KERNELS_BITS_H
#define RINGCOMM_KERNELS_BITS_H

#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif

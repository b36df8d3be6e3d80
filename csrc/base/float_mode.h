/* float_mode.h - the floating-point mode that the core computes in.
 *
 * Problem. A program's threads may round otherwise, or take subnormals for zeros: as
 * torch.set_flush_denormal() and libraries built with -ffast-math have it. Whichever thread drives
 * the engine computes, so ranks would end with different bits.
 *
 * Design. What computes is put between float_mode_enter and float_mode_leave, on one thread:
 * rounded to nearest, subnormals kept. To look costs a few cycles, and the mode is set only if it
 * is another one. Traps and the flags of exceptions stay the thread's own. Of architectures without
 * a mode here the default is taken for granted.
 */
#ifndef RINGCOMM_FLOAT_MODE_H
#define RINGCOMM_FLOAT_MODE_H

#include <stdint.h>

#if defined __x86_64__

/* The rounding, and both ways to lose subnormals. */
#define FLOAT_MODE_BITS UINT32_C(0xe040)
typedef uint32_t float_mode;

static inline float_mode float_mode_get(void)
{
    uint32_t mode;
    __asm__ volatile("stmxcsr %0" : "=m"(mode) : : "memory");
    return mode;
}

static inline void float_mode_set(float_mode mode)
{
    __asm__ volatile("ldmxcsr %0" : : "m"(mode) : "memory");
}

#elif defined __aarch64__

/* The rounding, all ways to lose subnormals, and NaN without payload. */
#define FLOAT_MODE_BITS UINT64_C(0x3c80003)
typedef uint64_t float_mode;

static inline float_mode float_mode_get(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
    return mode;
}

static inline void float_mode_set(float_mode mode)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}

#else

#define FLOAT_MODE_BITS UINT32_C(0)
typedef uint32_t float_mode;

static inline float_mode float_mode_get(void)
{
    return 0;
}

static inline void float_mode_set(float_mode mode)
{
    (void)mode;
}

#endif

/* Sets the default mode. Returns what float_mode_leave takes: the bits of another one. */
static inline float_mode float_mode_enter(void)
{
    float_mode mode = float_mode_get();
    if (mode & FLOAT_MODE_BITS)
        float_mode_set(mode & ~FLOAT_MODE_BITS);
    return mode & FLOAT_MODE_BITS;
}

static inline void float_mode_leave(float_mode before)
{
    if (before != 0)
        float_mode_set(float_mode_get() | before);
}

#endif

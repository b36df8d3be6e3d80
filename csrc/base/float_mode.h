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

/* FLOAT_MODE_BITS: the rounding, and all ways to lose subnormals (aarch64: and NaN's payload). */
#if defined __x86_64__
#define FLOAT_MODE_BITS 0xe040U
#define FLOAT_MODE_READ(mode) __asm__ volatile("stmxcsr %0" : "=m"(mode) : : "memory")
#define FLOAT_MODE_WRITE(mode) __asm__ volatile("ldmxcsr %0" : : "m"(mode) : "memory")
typedef uint32_t float_mode;
#elif defined __aarch64__
#define FLOAT_MODE_BITS 0x3c80003U
#define FLOAT_MODE_READ(mode) __asm__ volatile("mrs %0, fpcr" : "=r"(mode) : : "memory")
#define FLOAT_MODE_WRITE(mode) __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory")
typedef uint64_t float_mode;
#else
#define FLOAT_MODE_BITS 0U
#define FLOAT_MODE_READ(mode) ((mode) = 0)
#define FLOAT_MODE_WRITE(mode) ((void)(mode))
typedef uint32_t float_mode;
#endif

/* Sets the default mode. Returns what float_mode_leave takes: the bits of another one. */
static inline float_mode float_mode_enter(void)
{
    float_mode mode, others;
    FLOAT_MODE_READ(mode);
    others = mode & (float_mode)FLOAT_MODE_BITS;
    mode ^= others;
    if (others != 0)
        FLOAT_MODE_WRITE(mode);
    return others;
}

static inline void float_mode_leave(float_mode before)
{
    float_mode mode;
    if (before == 0)
        return;
    FLOAT_MODE_READ(mode);
    mode |= before;
    FLOAT_MODE_WRITE(mode);
}

#endif

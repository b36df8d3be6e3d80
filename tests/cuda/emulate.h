/* emulate.h - as much of CUDA as kernels.cu needs, for a C compiler; and the entry by which a test,
 * or a driver that is not one, launches kernels.
 *
 * Every thread of a block is a fibre. A fibre runs until it needs the other lanes of its warp (a
 * ballot, a shuffle) or of its block, and goes on when they are all there. Blocks are run one after
 * the other, odd ones and odd turns from the last thread to the first, so that what depends on an
 * order shows.
 */
#ifndef RINGCOMM_TEST_EMULATE_H
#define RINGCOMM_TEST_EMULATE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What emulated_launch returns, as the driver would. */
enum {
    EMULATED_OK = 0,
    EMULATED_BAD_LAUNCH = 1,  /* a grid of 0; a block of 0, more than 256, or not of whole warps */
    EMULATED_NOT_FOUND = 500, /* no such kernel */
    EMULATED_DIVERGED = 719   /* lanes wait for one another in different places */
};

/* Runs a kernel to its end. params as for cuLaunchKernel: where each argument lies. Any number of
 * threads may call it at once. */
int emulated_launch(const char *name, unsigned grid, unsigned block, void **params);

/* 1 if there is such a kernel. */
int emulated_has(const char *name);

/* Every pointer among a kernel's arguments but NULL goes through map before it is used: from an
 * address of the device to one that may be read and written here. NULL: they are the same. To be
 * set before the first launch. */
void emulated_map(void *(*map)(void *device));

#ifdef __cplusplus
}
#endif

#endif

/* small_kernels.c - kernels for the tests of the fake driver itself, behind the interface of
 * emulate.h. Their PTX, as far as a driver that runs none of it looks, is in tests/c/gpu.h. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "block_kernels.h"

#define API __attribute__((visibility("default")))

API int emulated_launch(const char *name, unsigned grid, unsigned block, void **params);
API void emulated_map(void *(*by)(void *device));

static void *(*map)(void *device);

void emulated_map(void *(*by)(void *device))
{
    map = by;
}

static void *reach(void *param)
{
    void *device = *(void **)param;
    return device != NULL ? map(device) : NULL;
}

int emulated_launch(const char *name, unsigned grid, unsigned block, void **params)
{
    const arguments all = {params, reach};
    if (block_kernels_launch(name, &all))
        return 0;
    float *at = reach(params[0]);
    if (grid == 0 || block == 0)
        return 1;
    if (strcmp(name, "fill") == 0) { /* (float *at, float value, u64 count) */
        for (uint64_t i = 0; i < *(uint64_t *)params[2]; i++)
            at[i] = *(float *)params[1];
        return 0;
    }
    if (strcmp(name, "scale") == 0) { /* (float *at, u64 count, float factor) */
        for (uint64_t i = 0; i < *(uint64_t *)params[1]; i++)
            at[i] *= *(float *)params[2];
        return 0;
    }
    return 500;
}

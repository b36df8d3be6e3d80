/* kernels.c - the kernel sets of this build, and the choice of one. */
#include "kernels.h"

#include <string.h>

static const kernel_set *const sets[] = {
    &kernels_scalar,
#ifdef __x86_64__
    &kernels_avx2,
    &kernels_avx512,
#endif
#ifdef __aarch64__
    &kernels_neon,
#endif
};

enum { SET_COUNT = sizeof sets / sizeof *sets };

const kernel_set *kernels_at(int index)
{
    return index >= 0 && index < SET_COUNT ? sets[index] : NULL;
}

const kernel_set *kernels_find(const char *name)
{
    for (int i = SET_COUNT - 1; i >= 0; i--)
        if ((!name || strcmp(name, sets[i]->name) == 0) && sets[i]->supported())
            return sets[i];
    return NULL;
}

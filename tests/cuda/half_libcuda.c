/* half_libcuda.c - a library with all of the driver's functions but one, as one of another version
 * might be. None of them is ever called. */
#define cuStreamGetCtx cuStreamGetCtx_of_another_version
#include "fake_libcuda.h"

#define DEFINE(name, suffix, parameters)                                                           \
    cu_result name##suffix parameters                                                              \
    {                                                                                              \
        return CU_UNKNOWN;                                                                         \
    }
#pragma GCC diagnostic ignored "-Wunused-parameter"
CUDA_FUNCTIONS(DEFINE)

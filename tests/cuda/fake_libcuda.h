/* fake_libcuda.h - what tests ask of the driver that is not one.
 *
 * The library has the functions that csrc/cuda/driver.h names, and behaves as CUDA's driver does,
 * as far as ringcomm can tell, with one difference: it does everything as late as the order of
 * streams and events allows. Work is only queued. It runs when somebody needs it: a copy that was
 * waited for, an event that was asked about, a host function; then all that it depends on runs, and
 * nothing else. So a wait that is missing shows every time: what should have been waited for has
 * not happened. With the order "early" all runs before the call that queues it returns, which shows
 * what is written or launched after the copy that should have taken it along.
 *
 * Device memory cannot be touched by the host: that is a SIGSEGV. Memory that was never written is
 * NaN, and so is what was freed. Copies from and to host memory that is not pinned are over when
 * the call returns (from) or wait (to), as the driver's are.
 *
 * Read from the environment by cuInit, once, and again after fake_cuda_reset:
 *   FAKE_CUDA_INIT=100           what cuInit returns
 *   FAKE_CUDA_VERSION=12040      of CUDA
 *   FAKE_CUDA_DEVICES=1          how many GPUs (at most 4), all alike
 *   FAKE_CUDA_CAPABILITY=86
 *   FAKE_CUDA_MEMORY_MB=1024     of each; taken from the machine as it is written
 *   FAKE_CUDA_ORDER=late         or early
 *   FAKE_CUDA_FAIL=cuMemAlloc_v2:1:2,cuMemcpyDtoHAsync_v2:3:700
 *                                the k-th call of a function fails with that error; "*": of any
 *   FAKE_CUDA_KERNELS=path       the library with emulated_launch (emulate.h) and emulated_map
 */
#ifndef RINGCOMM_TEST_FAKE_LIBCUDA_H
#define RINGCOMM_TEST_FAKE_LIBCUDA_H

#include "../../csrc/cuda/driver.h"

#define FAKE_API __attribute__((visibility("default")))

#define DECLARE(name, suffix, parameters) FAKE_API cu_result name##suffix parameters;
CUDA_FUNCTIONS(DECLARE)
#undef DECLARE

/* Runs what is queued, gives everything back and forgets all but that the process has a driver, and
 * which contexts other threads have pushed. */
FAKE_API void fake_cuda_reset(void);

/* ---- what was done ---- */

/* How often a function was called, under the name of its symbol: "cuMemAlloc_v2". */
FAKE_API int fake_cuda_calls(const char *name);
/* What has been made and not given back: "contexts" (retained), "streams", "events", "modules",
 * "memory" or "pinned"; NULL: all together. */
FAKE_API int fake_cuda_leaks(const char *kind);
/* The first thing done that CUDA leaves undefined or forbids, as a sentence; NULL if nothing was:
 * a handle used after it was destroyed, memory freed or unpinned under a copy, a write past the end
 * of an allocation, a call from a host function. */
FAKE_API const char *fake_cuda_misuse(void);
/* Pieces of work that have not run yet. */
FAKE_API int fake_cuda_pending(void);
/* Contexts that this thread has pushed, and its capture mode. */
FAKE_API int fake_cuda_depth(void);
FAKE_API int fake_cuda_capture_mode(void);

/* ---- what goes wrong ---- */

/* The k-th call from now on of a function fails (k = 1: the next). Errors that CUDA keeps until the
 * process ends are kept, until fake_cuda_reset. What gives something back does so even then. */
FAKE_API void fake_cuda_fail(const char *name, int k, int error);
/* How many of these failures are still to come. */
FAKE_API int fake_cuda_faults(void);
/* As when the process ends: every call returns CUDA_ERROR_DEINITIALIZED. */
FAKE_API void fake_cuda_deinitialize(void);
/* Starts (1) or ends (0) the capture of a stream into a graph, for the whole process. The end
 * returns 1 if nothing has spoilt it. */
FAKE_API int fake_cuda_capture(cu_stream stream, int on);
FAKE_API void fake_cuda_order_early(int early);
/* Who waits on the host for a stream, or for an event on it, does nothing for so long before: time
 * for others to get ahead of what it would have run. */
FAKE_API void fake_cuda_linger(cu_stream stream, unsigned ms);

/* ---- what the rest of a program does ---- */

/* At once, past all streams; 0, or 1 if that is not within an allocation. */
FAKE_API int fake_cuda_write(cu_address to, const void *from, size_t bytes);
FAKE_API int fake_cuda_read(void *to, cu_address from, size_t bytes);
/* A kernel of the user's: adds value to count floats, when it is the stream's turn. */
FAKE_API cu_result fake_cuda_add(cu_stream stream, cu_address at, float value, size_t count);
/* Another, written by the test: called from the GPU's thread when it is the stream's turn, late as
 * all else. It gets at device memory by fake_cuda_view: the host's view of it, past all streams;
 * NULL if that is not within an allocation. */
FAKE_API cu_result fake_cuda_run(cu_stream stream, cu_host_function *kernel, void *data);
FAKE_API void *fake_cuda_view(cu_address at, size_t bytes);
/* Device memory of another kind, given back by cuMemFree_v2; 0 if there is no room. */
enum fake_kind { FAKE_FOREIGN_CONTEXT, FAKE_MANAGED, FAKE_POOLED };
FAKE_API cu_address fake_cuda_memory(int ordinal, size_t bytes, int kind);
/* A stream of a context that is not the primary one. */
FAKE_API cu_stream fake_cuda_foreign_stream(int ordinal);

#endif

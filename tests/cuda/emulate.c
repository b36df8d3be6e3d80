/* emulate.c - csrc/cuda/kernels.cu, compiled as C and run by fibres; see emulate.h.
 *
 * A fibre is entered once by its context, and from then on by the compiler's own longjmp: it leaves
 * the signal mask alone, and no sanitizer of the program takes its stack for the thread's. The
 * fibres of a thread outlive its launches.
 */
#include "emulate.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

enum { LANES = 32, MOST_THREADS = 256, STACK = 64 << 10, COLOUR = 448 };

/* ---- fibres ---- */

enum waits { FOR_NOTHING, FOR_BALLOT, FOR_SHUFFLE, FOR_BLOCK, TO_BE_STARTED };

typedef void *jump[5]; /* where to go on, for __builtin_longjmp */

/* Of functions that another fibre may run in the middle of: what calls them expects nothing of any
 * register. */
#ifdef __clang__
#define SWITCHES __attribute__((noinline))
#else
#define SWITCHES __attribute__((noipa))
#endif

typedef struct fibre {
    ucontext_t entry;
    jump at;
    int entered;
    enum waits waits;
    unsigned value, from, result; /* of what it waits for; from: a lane */
    char *stack;
} fibre;

typedef struct machine {
    fibre fibres[MOST_THREADS];
    fibre *now;
    jump scheduler;
    void (*kernel)(void **params);
    void **params;
} machine;

typedef struct uint3 {
    unsigned x, y, z;
} uint3;

static _Thread_local machine *here;
static _Thread_local uint3 threadIdx, blockIdx, blockDim, gridDim;

/* Not where the place was noted: compilers do not take both in one function. */
static SWITCHES void go_to(jump place)
{
    __builtin_longjmp(place, 1);
}

static SWITCHES unsigned wait_for(enum waits what, unsigned value, unsigned from)
{
    fibre *self = here->now;
    self->waits = what;
    self->value = value;
    self->from = from;
    if (__builtin_setjmp(self->at) == 0)
        go_to(here->scheduler);
    return self->result;
}

static void live(void)
{
    for (;;) {
        here->kernel(here->params);
        wait_for(TO_BE_STARTED, 0, 0);
    }
}

/* Until it waits for something. */
static SWITCHES void go_on(machine *m, unsigned thread)
{
    fibre *f = &m->fibres[thread];
    m->now = f;
    threadIdx.x = thread;
    if (__builtin_setjmp(m->scheduler) != 0)
        return;
    if (f->entered)
        go_to(f->at);
    f->entered = 1;
    setcontext(&f->entry);
}

/* Stacks end in different sets of a cache. */
static int make_fibre(fibre *f, unsigned lane)
{
    if (f->stack == NULL && (f->stack = malloc(STACK + LANES * COLOUR)) == NULL)
        return 0;
    getcontext(&f->entry);
    f->entry.uc_stack.ss_sp = f->stack;
    f->entry.uc_stack.ss_size = STACK + lane * COLOUR;
    f->entry.uc_link = NULL;
    makecontext(&f->entry, live, 0);
    f->entered = 0;
    return 1;
}

/* ---- warps and blocks ---- */

/* What its lanes have come together for; 0 if they have not. */
static int resolve(fibre *warp)
{
    unsigned ballot = 0;
    for (unsigned lane = 0; lane < LANES; lane++) {
        if (warp[lane].waits != warp[0].waits)
            return 0;
        ballot |= (unsigned)(warp[lane].value != 0) << lane;
    }
    for (unsigned lane = 0; lane < LANES; lane++)
        warp[lane].result =
            warp[0].waits == FOR_BALLOT ? ballot : warp[warp[lane].from % LANES].value;
    return 1;
}

/* Until it waits for its block, or has ended. */
static int run_warp(machine *m, unsigned first, unsigned turn)
{
    fibre *warp = &m->fibres[first];
    do {
        for (unsigned i = 0; i < LANES; i++)
            go_on(m, first + (turn % 2 ? LANES - 1 - i : i));
        turn++;
        if (!resolve(warp))
            return 0;
    } while (warp->waits == FOR_BALLOT || warp->waits == FOR_SHUFFLE);
    return 1;
}

static int run_block(machine *m, unsigned block, unsigned threads)
{
    unsigned warps = threads / LANES, turn = block;
    do {
        for (unsigned i = 0; i < warps; i++)
            if (!run_warp(m, LANES * (turn % 2 ? warps - 1 - i : i), turn))
                return 0;
        for (unsigned i = 1; i < warps; i++)
            if (m->fibres[i * LANES].waits != m->fibres[0].waits)
                return 0;
        turn++;
    } while (m->fibres[0].waits == FOR_BLOCK);
    return 1;
}

/* ---- the names of CUDA ---- */

#define KERNEL static void
#define DEVICE static inline __attribute__((always_inline, unused))
#define __shared__ static _Thread_local

typedef struct __attribute__((aligned(16))) float4 {
    float x, y, z, w;
} float4;

typedef struct __attribute__((aligned(8))) uint2 {
    unsigned x, y;
} uint2;

DEVICE double __dmul_rn(double x, double y)
{
    return x * y;
}

/* Rounded up. */
DEVICE unsigned long long __double2ull_ru(double x)
{
    const unsigned long long whole = (unsigned long long)x;
    return whole + ((double)whole < x);
}

DEVICE int __popc(unsigned x)
{
    return __builtin_popcount(x);
}

DEVICE int __clz(int x)
{
    return x == 0 ? 32 : __builtin_clz((unsigned)x);
}

/* Fibres do not interrupt each other. */
DEVICE unsigned atomicAdd(unsigned *sum, unsigned x)
{
    *sum += x;
    return *sum - x;
}

DEVICE unsigned __float_as_uint(float x)
{
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

DEVICE float __uint_as_float(unsigned bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Every NaN that arithmetic gives is the same one, unlike a processor's. */
DEVICE float as_of_gpu(float x)
{
    return x == x ? x : __uint_as_float(0x7fffffff);
}

DEVICE float __fmul_rn(float x, float y)
{
    return as_of_gpu(x * y);
}

DEVICE float __fadd_rn(float x, float y)
{
    return as_of_gpu(x + y);
}

DEVICE float __fdiv_rn(float x, float y)
{
    return as_of_gpu(x / y);
}

DEVICE float __fsqrt_rn(float x)
{
    return as_of_gpu(__builtin_sqrtf(x));
}

/* Fibres of a part of a warp could not wait for each other. */
DEVICE void need_whole(unsigned mask)
{
    if (mask != ~0u)
        abort();
}

DEVICE unsigned __ballot_sync(unsigned mask, int predicate)
{
    need_whole(mask);
    return wait_for(FOR_BALLOT, predicate != 0, 0);
}

DEVICE unsigned __shfl_sync(unsigned mask, unsigned value, int from)
{
    need_whole(mask);
    return wait_for(FOR_SHUFFLE, value, (unsigned)from);
}

DEVICE unsigned __shfl_xor_sync(unsigned mask, unsigned value, int by)
{
    return __shfl_sync(mask, value, (int)((threadIdx.x ^ (unsigned)by) % LANES));
}

DEVICE void __syncthreads(void)
{
    wait_for(FOR_BLOCK, 0, 0);
}

#include "../../csrc/cuda/kernels.cu"

/* ---- launches ---- */

static void *(*map)(void *device);

void emulated_map(void *(*by)(void *device))
{
    map = by;
}

static void *pointer(void *param)
{
    void *device = *(void **)param;
    return map != NULL && device != NULL ? map(device) : device;
}

#define AT(type, i) (*(type *)params[i])

#define HALF(name)                                                                                 \
    static void call_pack_##name(void **params)                                                    \
    {                                                                                              \
        ringcomm_pack_##name(pointer(params[0]), pointer(params[1]), AT(float, 2), AT(u64, 3));    \
    }                                                                                              \
    static void call_unpack_##name(void **params)                                                  \
    {                                                                                              \
        ringcomm_unpack_##name(pointer(params[0]), pointer(params[1]), AT(u64, 2));                \
    }

#define BLOCK(name)                                                                                \
    static void call_pack_##name(void **params)                                                    \
    {                                                                                              \
        ringcomm_pack_##name(pointer(params[0]), pointer(params[1]), AT(u64, 2), AT(u64, 3),       \
                             AT(u64, 4));                                                          \
    }                                                                                              \
    static void call_unpack_##name(void **params)                                                  \
    {                                                                                              \
        ringcomm_unpack_##name(pointer(params[0]), pointer(params[1]), AT(u64, 2), AT(u64, 3),     \
                               AT(u64, 4));                                                        \
    }                                                                                              \
    static void call_add_##name(void **params)                                                     \
    {                                                                                              \
        ringcomm_add_##name(pointer(params[0]), pointer(params[1]), AT(u64, 2), AT(float, 3),      \
                            AT(u64, 4), AT(u64, 5), AT(u64, 6));                                   \
    }

HALF(bf16)
HALF(fp16)
BLOCK(int8)
BLOCK(int4)
BLOCK(onebit)
BLOCK(fp8)

static void call_scale(void **params)
{
    ringcomm_scale(pointer(params[0]), pointer(params[1]), AT(float, 2), AT(u64, 3));
}

#define BOTH(name)                                                                                 \
    {"ringcomm_pack_" #name, call_pack_##name},                                                    \
    {                                                                                              \
        "ringcomm_unpack_" #name, call_unpack_##name                                               \
    }

#define THREE(name)                                                                                \
    BOTH(name),                                                                                    \
    {                                                                                              \
        "ringcomm_add_" #name, call_add_##name                                                     \
    }

static const struct {
    const char *name;
    void (*run)(void **params);
} kernels[] = {
    BOTH(bf16),
    BOTH(fp16),
    THREE(int8),
    THREE(int4),
    THREE(onebit),
    THREE(fp8),
    {"ringcomm_scale", call_scale},
};

static void (*find(const char *name))(void **params)
{
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (strcmp(kernels[i].name, name) == 0)
            return kernels[i].run;
    return NULL;
}

int emulated_has(const char *name)
{
    return find(name) != NULL;
}

/* ---- the fibres of a thread ---- */

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void drop_machine(void *old)
{
    machine *m = old;
    for (unsigned i = 0; i < MOST_THREADS; i++)
        free(m->fibres[i].stack);
    free(m);
}

static void make_key(void)
{
    if (pthread_key_create(&key, drop_machine) != 0)
        abort();
}

static machine *own_machine(void)
{
    pthread_once(&once, make_key);
    if (here == NULL) {
        here = calloc(1, sizeof *here);
        if (here == NULL || pthread_setspecific(key, here) != 0)
            abort();
    }
    return here;
}

/* Of the last launch that did not end well, fibres are left in the middle: made anew. */
static void make_fibres(machine *m, unsigned threads)
{
    for (unsigned i = 0; i < threads; i++)
        if (m->fibres[i].stack == NULL || m->fibres[i].waits != TO_BE_STARTED)
            if (!make_fibre(&m->fibres[i], i % LANES))
                abort();
}

int emulated_launch(const char *name, unsigned grid, unsigned block, void **params)
{
    void (*run)(void **) = find(name);
    if (run == NULL)
        return EMULATED_NOT_FOUND;
    if (grid == 0 || block == 0 || block > MOST_THREADS || block % LANES != 0)
        return EMULATED_BAD_LAUNCH;
    machine *m = own_machine();
    m->kernel = run;
    m->params = params;
    make_fibres(m, block);
    gridDim.x = grid;
    blockDim.x = block;
    for (unsigned i = 0; i < grid; i++) {
        blockIdx.x = i % 2 ? grid - 1 - i / 2 : i / 2;
        if (!run_block(m, i, block))
            return EMULATED_DIVERGED;
    }
    return EMULATED_OK;
}

/* guarded_memory.c - an allocator, preloaded, under which memory that was freed can be neither read
 * nor written, by the program or by the kernel for it.
 *
 * Blocks of at least GUARDED bytes, and all of posix_memalign (torch's tensors), lie at the end of
 * pages of their own in one reserved range, each behind a page with its size. free() takes the
 * pages away and the range is never used again. Smaller blocks are glibc's.
 *
 *     LD_PRELOAD=./guarded_memory.so python lifetimes.py
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, GUARDED = 4096 };
#define RANGE ((size_t)1 << 40)

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

static _Atomic(char *) range;
static _Atomic size_t used;

static char *start_of_range(void)
{
    char *now = atomic_load(&range);
    if (now != NULL)
        return now;
    char *made = mmap(NULL, RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED)
        abort();
    if (atomic_compare_exchange_strong(&range, &now, made))
        return made;
    munmap(made, RANGE);
    return now;
}

static int is_guarded(const void *at)
{
    char *first = atomic_load(&range);
    return first != NULL && (const char *)at >= first && (const char *)at < first + RANGE;
}

/* A page with the size, then the block's pages, of which it takes the end. */
static void *guarded(size_t align, size_t bytes)
{
    if (align > PAGE || bytes > RANGE / 16)
        return NULL;
    size_t pages = (bytes + PAGE - 1) / PAGE + 1;
    char *head = start_of_range() + atomic_fetch_add(&used, (pages + 1) * PAGE);
    if (head + pages * PAGE > range + RANGE ||
        mprotect(head, pages * PAGE, PROT_READ | PROT_WRITE) != 0)
        return NULL;
    *(size_t *)head = bytes;
    return head + PAGE + ((pages - 1) * PAGE - bytes) / align * align;
}

static char *head_of(void *block)
{
    /* Blocks of up to a page lie in the page behind theirs; of none, at its end. */
    uintptr_t page = (uintptr_t)block & ~(uintptr_t)(PAGE - 1);
    return (char *)page - PAGE;
}

void *malloc(size_t bytes)
{
    return bytes < GUARDED ? __libc_malloc(bytes) : guarded(16, bytes);
}

void *calloc(size_t count, size_t bytes)
{
    if (bytes != 0 && count > SIZE_MAX / bytes)
        return NULL;
    return count * bytes < GUARDED ? __libc_calloc(count, bytes) : guarded(16, count * bytes);
}

void free(void *block)
{
    if (!is_guarded(block)) {
        __libc_free(block);
        return;
    }
    int kept = errno;
    char *head = head_of(block);
    size_t bytes = (*(size_t *)head + PAGE - 1) / PAGE * PAGE + PAGE;
    madvise(head, bytes, MADV_DONTNEED);
    mprotect(head, bytes, PROT_NONE);
    errno = kept;
}

void *realloc(void *block, size_t bytes)
{
    if (!is_guarded(block) && bytes < GUARDED)
        return __libc_realloc(block, bytes);
    if (block == NULL)
        return malloc(bytes);
    if (!is_guarded(block)) { /* it grows into a guarded one: glibc knows how much there is */
        void *grown = __libc_realloc(block, bytes);
        void *made = grown == NULL ? NULL : malloc(bytes);
        if (made != NULL)
            memcpy(made, grown, bytes);
        __libc_free(grown);
        return made;
    }
    size_t before = *(size_t *)head_of(block);
    void *made = malloc(bytes);
    if (made != NULL) {
        memcpy(made, block, before < bytes ? before : bytes);
        free(block);
    }
    return made;
}

int posix_memalign(void **out, size_t align, size_t bytes)
{
    void *made = guarded(align, bytes == 0 ? 1 : bytes);
    if (made == NULL)
        return ENOMEM;
    *out = made;
    return 0;
}

void *memalign(size_t align, size_t bytes)
{
    return bytes < GUARDED ? __libc_memalign(align, bytes) : guarded(align, bytes);
}

void *aligned_alloc(size_t align, size_t bytes)
{
    return memalign(align, bytes);
}

size_t malloc_usable_size(void *block)
{
    return is_guarded(block) ? *(size_t *)head_of(block) : 0;
}

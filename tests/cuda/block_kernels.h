/* block_kernels.h - see block_kernels.c. */
#ifndef RINGCOMM_TEST_BLOCK_KERNELS_H
#define RINGCOMM_TEST_BLOCK_KERNELS_H

typedef struct arguments {
    void **params;
    void *(*at)(void *param); /* where the host gets at what it points to; NULL for NULL */
} arguments;

/* 1 if there is such a kernel; it has run. */
int block_kernels_launch(const char *name, const arguments *a);

#endif

/* fds.h - counts this process's descriptors, so that a test can see what it left open. */
#ifndef RINGCOMM_TEST_FDS_H
#define RINGCOMM_TEST_FDS_H

#include <dirent.h>
#include <stdlib.h>

static inline int open_fds(void)
{
    int count = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (dir != NULL && readdir(dir) != NULL)
        count++;
    if (dir != NULL)
        closedir(dir);
    return count;
}

#endif

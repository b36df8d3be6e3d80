/* maps.h - counts this process's mappings of files with this in their name, so that a test can see
 * what it left mapped. */
#ifndef RINGCOMM_TEST_MAPS_H
#define RINGCOMM_TEST_MAPS_H

#include <stdio.h>
#include <string.h>

static inline int mappings_of(const char *name)
{
    char line[1024];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL)
        count += strstr(line, name) != NULL;
    if (maps != NULL)
        fclose(maps);
    return count;
}

#endif

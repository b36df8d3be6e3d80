/* golden.h - reads tests/golden: two hexadecimal digits per byte, remarks from # to the line's end.
 */
#ifndef RINGCOMM_TEST_GOLDEN_H
#define RINGCOMM_TEST_GOLDEN_H

#include <stdint.h>
#include <stdio.h>

/* The bytes of tests/golden/<name>.hex, at most `most`; 0 if there is no such file. */
static inline size_t golden_read(const char *name, uint8_t *bytes, size_t most)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s.hex", GOLDEN_DIR, name);
    FILE *file = fopen(path, "r");
    size_t n = 0;
    int c;
    while (file != NULL && (c = fgetc(file)) != EOF) {
        unsigned value;
        if (c == '#')
            while (c != '\n' && c != EOF)
                c = fgetc(file);
        else if (c != ' ' && c != '\n' && ungetc(c, file) == c && n < most &&
                 fscanf(file, "%2x", &value) == 1)
            bytes[n++] = (uint8_t)value;
    }
    if (file != NULL)
        fclose(file);
    return n;
}

#endif

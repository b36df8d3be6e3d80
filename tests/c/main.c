/* main.c - all tests in one program, as linking costs more than compiling most of them: it runs the
 * file whose name it is called by. TESTS names them; each has its main under a name of its own. */
#include <stdio.h>
#include <string.h>

#define DECLARE(name) int test_##name(int argc, char **argv);
#define ENTRY(name) {"test_" #name, test_##name},

TESTS(DECLARE)

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(int argc, char **argv);
    } files[] = {TESTS(ENTRY)};
    const char *slash = strrchr(argv[0], '/'), *name = slash != NULL ? slash + 1 : argv[0];
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (strcmp(name, files[i].name) == 0)
            return files[i].run(argc, argv);
    fprintf(stderr, "there is no %s in this program\n", name);
    return 2;
}

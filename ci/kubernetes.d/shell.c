// /bin/sh of the stand-in images. Debian's busybox differs from the upstream image's in one point that specs look at: its ash drops
// environment variables whose names are no identifiers (data-1). With such a variable bash is the shell, otherwise ash, whose
// error messages the specs compare.
#define _GNU_SOURCE
#include <ctype.h>
#include <unistd.h>

static int is_identifier(const char *entry) {
    if (!isalpha((unsigned char)*entry) && *entry != '_') return 0;
    while (isalnum((unsigned char)*entry) || *entry == '_') entry++;
    return *entry == '=';
}

int main(int argc, char **argv) {
    const char *shell = "/bin/busybox";
    (void)argc;
    for (char **entry = environ; *entry; entry++)
        if (!is_identifier(*entry)) shell = "/bin/bash";
    execv(shell, argv);
    return 127;
}

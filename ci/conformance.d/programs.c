/* The programs that critest's images must have and Debian's busybox has not: one static program, whose name says
 * which of them it is. They do what the specs look at, and no more. */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* nginx, httpd: answers each connection with a page; the pid stands in /var/run/NAME.pid. */
static int serve(const char *name, int port)
{
    char path[64], request[4096];
    const char page[] = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 6\r\nConnection: close\r\n\r\nhello\n";
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
    FILE *file;

    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, _exit);
    signal(SIGQUIT, _exit);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 64)) {
        fprintf(stderr, "%s: port %d: %s\n", name, port, strerror(errno));
        return 1;
    }
    snprintf(path, sizeof path, "/var/run/%s.pid", name);
    file = fopen(path, "w");
    if (file) {
        fprintf(file, "%d\n", (int)getpid());
        fclose(file);
    }
    printf("%s: listening on port %d\n", name, port);
    fflush(stdout);
    for (;;) {
        int connection = accept(listener, NULL, NULL);

        if (connection < 0)
            continue;
        if (read(connection, request, sizeof request) > 0 && write(connection, page, sizeof page - 1) < 0)
            perror(name);
        shutdown(connection, SHUT_WR);
        while (read(connection, request, sizeof request) > 0)
            ;
        close(connection);
    }
}

/* pgrep WORD: the ids of the processes whose name holds it. */
static int pgrep(const char *word)
{
    DIR *proc = opendir("/proc");
    struct dirent *entry;
    int found = 0;

    while (proc && (entry = readdir(proc))) {
        char path[300], name[64];
        FILE *file;

        snprintf(path, sizeof path, "/proc/%s/comm", entry->d_name);
        if (atoi(entry->d_name) <= 0 || atoi(entry->d_name) == getpid() || !(file = fopen(path, "r")))
            continue;
        if (fgets(name, sizeof name, file) && strstr(name, word)) {
            printf("%s\n", entry->d_name);
            found = 1;
        }
        fclose(file);
    }
    return !found;
}

/* ipcs: the segments of shared memory, as the kernel lists them. */
static int ipcs(void)
{
    FILE *file = fopen("/proc/sysvipc/shm", "r");
    int byte;

    if (!file) {
        perror("/proc/sysvipc/shm");
        return 1;
    }
    while ((byte = getc(file)) != EOF)
        putchar(byte);
    return 0;
}

int main(int count, char **arguments)
{
    const char *slash = strrchr(arguments[0], '/'), *name = slash ? slash + 1 : arguments[0];

    if (!strcmp(name, "nginx") || !strcmp(name, "httpd"))
        return serve(name, count > 1 ? atoi(arguments[1]) : 80);
    if (!strcmp(name, "pgrep"))
        return pgrep(count > 1 ? arguments[count - 1] : "");
    if (!strcmp(name, "ipcs"))
        return ipcs();
    if (!strcmp(name, "nonewprivs"))
        return printf("Effective uid: %d\n", (int)geteuid()) < 0;
    if (!strcmp(name, "pause")) {
        signal(SIGTERM, _exit);
        signal(SIGINT, _exit);
        for (;;)
            pause();
    }
    fprintf(stderr, "%s: not known\n", name);
    return 2;
}

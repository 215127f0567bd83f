// The init of the guests in tests/machine.rs: says what it finds, then does what the kernel's command line says.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/random.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

static char cmdline[4096];

static int asked(const char *word) {
    char key[64];
    snprintf(key, sizeof key, "do=%s", word);
    return strstr(cmdline, key) != NULL;
}

static long now(clockid_t clock) {
    struct timespec at;
    clock_gettime(clock, &at);
    return at.tv_sec * 1000 + at.tv_nsec / 1000000;
}

static void *spin(void *unused) {
    for (volatile unsigned long n = 0;; n++) {}
    return unused;
}

// Runs on each processor in turn.
static int tour(long cpus) {
    int seen = 0;
    for (int cpu = 0; cpu < cpus; cpu++) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpu, &set);
        if (sched_setaffinity(0, sizeof set, &set) == 0 && sched_getcpu() == cpu) seen++;
    }
    return seen;
}

// The sum of the bytes of the first megabyte of the disk.
static unsigned disk(void) {
    static unsigned char bytes[1 << 20];
    unsigned sum = 0;
    int fd = open("/dev/vda", O_RDONLY);
    ssize_t got = fd < 0 ? -1 : read(fd, bytes, sizeof bytes);
    for (ssize_t i = 0; i < got; i++) sum += bytes[i];
    return sum;
}

static int memory_is_good(size_t mib) {
    size_t words = mib << 17;
    unsigned long *at = malloc(words * sizeof *at);
    if (!at) return 0;
    for (size_t i = 0; i < words; i += 64) at[i] = i * 0x9e3779b97f4a7c15;
    for (size_t i = 0; i < words; i += 64)
        if (at[i] != i * 0x9e3779b97f4a7c15) return 0;
    free(at);
    return 1;
}

int main(void) {
    long up = now(CLOCK_BOOTTIME);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
    int console = open("/dev/console", O_RDWR);
    if (console >= 0) dup2(console, 0), dup2(console, 1), dup2(console, 2);
    setvbuf(stdout, NULL, _IOLBF, 0);
    int fd = open("/proc/cmdline", O_RDONLY);
    if (fd < 0 || read(fd, cmdline, sizeof cmdline - 1) < 0) return 1;
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    printf("up after %ld ms with %ld CPUs and %ld MiB\n", up, cpus, sysconf(_SC_PHYS_PAGES) / 256);
    if (asked("tour")) printf("toured %d CPUs\n", tour(cpus));
    if (asked("disk")) printf("disk sum %u\n", disk());
    if (asked("memory")) printf("memory %s\n", memory_is_good(48) ? "good" : "bad");
    if (asked("spin")) {
        for (long i = 0; i < cpus; i++) {
            pthread_t thread;
            pthread_create(&thread, NULL, spin, NULL);
        }
        printf("spinning\n");
        for (;;) pause();
    }
    if (asked("count"))
        for (long n = 0;; n++) {
            printf("count %ld at %ld\n", n, now(CLOCK_MONOTONIC));
            usleep(20000);
        }
    if (asked("free")) {
        printf("memory %s\n", memory_is_good(48) ? "good" : "bad");
        for (;;) pause();
    }
    if (asked("draw")) {
        static char lines[65536];
        int fd = open("/proc/interrupts", O_RDONLY);
        if (fd < 0 || read(fd, lines, sizeof lines - 1) < 0) return 1;
        printf("generation id: %s\n", strstr(lines, "nacelle-genid") ? "watched" : "none");
        for (;;) {
            unsigned long number;
            if (getrandom(&number, sizeof number, 0) != sizeof number) return 1;
            printf("draw %016lx\n", number);
            usleep(20000);
        }
    }
    // The kernel's own messages go another way to the same port: let it finish.
    tcdrain(1);
    if (asked("panic")) return 1;
    if (asked("halt")) reboot(RB_HALT_SYSTEM);
    reboot(RB_AUTOBOOT);
    for (;;) pause();
}

// The init of the guest in tests/qemu.rs: obeys commands that come over vsock from port 1024 of the host, one a
// line, and answers each with one line. A second process echoes what comes to its own port 5000.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/blkpg.h>
#include <linux/fs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <linux/vm_sockets.h>
#include <unistd.h>

static char buffer[1 << 20] __attribute__((aligned(4096)));

static int vsock(unsigned port, int connecting) {
    struct sockaddr_vm at = {.svm_family = AF_VSOCK, .svm_cid = connecting ? VMADDR_CID_HOST : VMADDR_CID_ANY, .svm_port = port};
    int fd = socket(AF_VSOCK, SOCK_STREAM, 0);
    if (fd < 0) return -1;
    if (connecting ? connect(fd, (void *)&at, sizeof at) : bind(fd, (void *)&at, sizeof at) || listen(fd, 8)) return -1;
    return fd;
}

static void echo(int listener) {
    for (;;) {
        int fd = accept(listener, 0, 0);
        if (fd < 0) continue;
        if (fork()) {
            close(fd);
            continue;
        }
        ssize_t count;
        while ((count = read(fd, buffer, sizeof buffer)) > 0)
            for (ssize_t done = 0, now; done < count; done += now)
                if ((now = write(fd, buffer + done, count - done)) <= 0) _exit(1);
        shutdown(fd, SHUT_WR);
        _exit(0);
    }
}

static int line_of(const char *path, char *into, size_t room) {
    int fd = open(path, O_RDONLY);
    ssize_t count = fd < 0 ? -1 : read(fd, into, room - 1);
    close(fd);
    into[count < 0 ? 0 : count] = 0;
    into[strcspn(into, "\n")] = 0;
    return count > 0;
}

// The disk with a serial number: /dev/vda, say.
static int find(const char *serial, char *name) {
    for (char letter = 'a'; letter < 'f'; letter++) {
        char path[64], found[64];
        sprintf(path, "/sys/block/vd%c/serial", letter);
        if (line_of(path, found, sizeof found) && !strcmp(found, serial)) return sprintf(name, "vd%c", letter);
    }
    return 0;
}

static int disk(const char *serial, int partition, int flags) {
    char name[16] = "", path[64];
    if (!find(serial, name)) return -1;
    sprintf(path, partition ? "/dev/%s%d" : "/dev/%s", name, partition);
    return open(path, flags);
}

// FNV-1a, 64 bits.
static int sum(int fd, uint64_t at, uint64_t length, uint64_t *hash) {
    *hash = 0xcbf29ce484222325u;
    while (length) {
        ssize_t count = pread(fd, buffer, length < sizeof buffer ? length : sizeof buffer, at);
        if (count <= 0) return -1;
        for (ssize_t i = 0; i < count; i++) *hash = (*hash ^ (unsigned char)buffer[i]) * 0x100000001b3u;
        at += count, length -= count;
    }
    return 0;
}

static void obey(char *command, char *answer) {
    char serial[32] = "", name[16], path[64];
    unsigned long long one = 0, two = 0, number = 0;
    sscanf(command, "%*s %31s %llu %llu %llu", serial, &one, &two, &number);
    uint64_t hash = 0;
    int fd = -1, failed = 0;
    answer[0] = 0;
    if (!strncmp(command, "size ", 5)) {
        failed = !find(serial, name) || (sprintf(path, "/sys/block/%s/size", name), !line_of(path, answer, 64));
    } else if (!strncmp(command, "sum ", 4)) { // serial, offset, length, partition
        failed = (fd = disk(serial, number, O_RDONLY | O_DIRECT)) < 0 || sum(fd, one, two, &hash);
        sprintf(answer, "%016llx", (unsigned long long)hash);
    } else if (!strncmp(command, "part ", 5)) { // serial, offset, length, number
        struct blkpg_partition part = {.start = one, .length = two, .pno = number};
        struct blkpg_ioctl_arg arg = {.op = BLKPG_ADD_PARTITION, .datalen = sizeof part, .data = &part};
        failed = (fd = disk(serial, 0, O_RDONLY)) < 0 || ioctl(fd, BLKPG, &arg);
        sprintf(answer, "added");
    } else if (!strncmp(command, "fill ", 5)) { // serial, offset, length, byte
        failed = (fd = disk(serial, 0, O_RDWR)) < 0;
        memset(buffer, number, sizeof buffer);
        for (unsigned long long at = one; !failed && at < one + two; at += sizeof buffer)
            failed = pwrite(fd, buffer, sizeof buffer, at) != sizeof buffer;
        failed = failed || fsync(fd);
        sprintf(answer, "filled");
    } else if (!strncmp(command, "discard ", 8) || !strncmp(command, "zero ", 5)) {
        uint64_t range[2] = {one, two};
        failed = (fd = disk(serial, 0, O_RDWR)) < 0 || ioctl(fd, command[0] == 'd' ? BLKDISCARD : BLKZEROOUT, range);
        sprintf(answer, "done");
    } else if (!strncmp(command, "random", 6)) {
        failed = (fd = open("/dev/hwrng", O_RDONLY)) < 0 || read(fd, buffer, 16) != 16;
        for (int i = 0; i < 16; i++) sprintf(answer + 2 * i, "%02x", (unsigned char)buffer[i]);
    } else {
        errno = ENOSYS;
        failed = 1;
    }
    if (failed) sprintf(answer, "failed: %s", strerror(errno));
    if (fd >= 0) close(fd);
}

int main(void) {
    mkdir("/dev", 0755), mkdir("/sys", 0755);
    mount("dev", "/dev", "devtmpfs", 0, 0);
    mount("sys", "/sys", "sysfs", 0, 0);
    int listener = vsock(5000, 0);
    if (listener >= 0 && !fork()) echo(listener);
    int host = vsock(1024, 1);
    if (host < 0) {
        perror("init: cannot connect to the host");
        reboot(RB_AUTOBOOT);
    }
    FILE *commands = fdopen(host, "r");
    char command[256], answer[256];
    while (fgets(command, sizeof command, commands)) {
        obey(command, answer);
        strcat(answer, "\n");
        if (write(host, answer, strlen(answer)) < 0) break;
    }
    reboot(RB_AUTOBOOT);
}

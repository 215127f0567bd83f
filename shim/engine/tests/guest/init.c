// The guest of the contract suite: PID 1 that says hello to the host's vsock port 1024 and does what it is told on its
// own port 1025: one line a connection, the answer, the end. The commands are described in src/contract/mod.rs; `nic`
// is for the tests of engines with a tap, and the benchmarks (ci/bench blk, net) have some of their own:
//   reads DISK SECONDS THREADS   random reads of 4 KiB past the page cache, answered by their number a second
//   address A.B.C.D              eth0 has this address (/24) and is up
//   send A.B.C.D PORT SECONDS    bytes a second over one TCP connection to there
//   faults MIB                   writes one byte of each page of new memory; nanoseconds a page
//   chase MIB STEPS              dependent reads all over memory; nanoseconds a read
//   bind                         binds the driver to devices that came after the boot; how many, and the microseconds
//   receive PORT                 takes one TCP connection; bytes a second until its end
// For the tests of snapshots:
//   count PAGES                  from now on, adds one to a number in each page of new memory, page after page, as long as all are right
//   counted                      how often it has done so, and how many numbers were wrong
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/if_packet.h>
#include <linux/vm_sockets.h>
#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/random.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <sys/time.h>
#include <termios.h>
#include <time.h>
#include <time.h>
#include <unistd.h>

static void say(int fd, const char *text) {
    size_t done = 0, length = strlen(text);
    while (done < length) {
        ssize_t n = write(fd, text + done, length - done);
        if (n <= 0) return;
        done += n;
    }
}

static int dial(unsigned port) {
    struct sockaddr_vm host = { .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_HOST, .svm_port = port };
    // The default of two seconds is not enough on a busy node.
    struct timeval limit = { .tv_sec = 120 };
    int fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(fd, AF_VSOCK, SO_VM_SOCKETS_CONNECT_TIMEOUT, &limit, sizeof limit);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&host, sizeof host) == 0) return fd;
    int error = errno;
    if (fd >= 0) close(fd);
    errno = error;
    return -1;
}

static int disk(int index, int flags) {
    char path[] = "/dev/vda";
    path[7] += index;
    return open(path, flags | O_CLOEXEC);
}

static void size(int fd, int index) {
    unsigned long long bytes = 0;
    char answer[64];
    int dev = disk(index, O_RDONLY);
    if (dev < 0 || ioctl(dev, BLKGETSIZE64, &bytes) != 0) snprintf(answer, sizeof answer, "errno %d\n", errno);
    else snprintf(answer, sizeof answer, "%llu\n", bytes);
    if (dev >= 0) close(dev);
    say(fd, answer);
}

// FNV-1a of what the device says now, not of what the page cache remembers.
static void sum(int fd, int index, off_t at, off_t length) {
    static const int piece = 65536;
    char *buffer = aligned_alloc(4096, piece), answer[64];
    uint64_t hash = 0xcbf29ce484222325;
    int dev = disk(index, O_RDONLY | O_DIRECT);
    while (dev >= 0 && length > 0) {
        ssize_t n = pread(dev, buffer, length < piece ? length : piece, at);
        if (n <= 0) break;
        for (ssize_t i = 0; i < n; i++) hash = (hash ^ (unsigned char)buffer[i]) * 0x100000001b3;
        at += n, length -= n;
    }
    if (length > 0) snprintf(answer, sizeof answer, "errno %d\n", errno);
    else snprintf(answer, sizeof answer, "%016llx\n", (unsigned long long)hash);
    if (dev >= 0) close(dev);
    free(buffer);
    say(fd, answer);
}

static void fill(int fd, int index, off_t at, int byte, size_t length) {
    char answer[64] = "ok\n", *buffer = malloc(length);
    memset(buffer, byte, length);
    int dev = disk(index, O_RDWR);
    if (dev < 0 || pwrite(dev, buffer, length, at) != (ssize_t)length || fsync(dev) != 0)
        snprintf(answer, sizeof answer, "errno %d\n", errno);
    if (dev >= 0) close(dev);
    free(buffer);
    say(fd, answer);
}

static void hwrng(int fd) {
    unsigned char bytes[16];
    char answer[64] = "";
    int dev = open("/dev/hwrng", O_RDONLY | O_CLOEXEC);
    if (dev < 0 || read(dev, bytes, sizeof bytes) != sizeof bytes) snprintf(answer, sizeof answer, "errno %d", errno);
    else for (unsigned i = 0; i < sizeof bytes; i++) sprintf(answer + 2 * i, "%02x", bytes[i]);
    if (dev >= 0) close(dev);
    say(fd, strcat(answer, "\n"));
}

// Connections of this guest's port that have not ended.
static atomic_int connections;

static void draw(int fd) {
    unsigned char bytes[16] = { 0 };
    char answer[64];
    getrandom(bytes, sizeof bytes, 0);
    for (unsigned i = 0; i < sizeof bytes; i++) sprintf(answer + 2 * i, "%02x", bytes[i]);
    say(fd, strcat(answer, "\n"));
}

// Sleeps, so that a timer has to come; then the time since boot in milliseconds.
static void nap(int fd, int milliseconds) {
    struct timespec now, pause = { milliseconds / 1000, milliseconds % 1000 * 1000000L };
    char answer[64];
    nanosleep(&pause, NULL);
    clock_gettime(CLOCK_MONOTONIC, &now);
    snprintf(answer, sizeof answer, "%lld\n", now.tv_sec * 1000LL + now.tv_nsec / 1000000), say(fd, answer);
}

static void serial(int fd, int index) {
    char path[] = "/sys/block/vda/serial", answer[64] = "";
    path[13] += index;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = file < 0 ? -1 : read(file, answer, sizeof answer - 2);
    if (file >= 0) close(file);
    if (n < 0) snprintf(answer, sizeof answer, "errno %d", errno);
    say(fd, strcat(answer, "\n"));
}

static void call(int fd, unsigned port) {
    char answer[64] = "ok\n";
    int out = dial(port);
    if (out < 0) snprintf(answer, sizeof answer, "errno %d\n", errno);
    else say(out, "called\n"), close(out);
    say(fd, answer);
}

// The address and MTU of eth0; then one broadcast frame of an experimental protocol goes out through it.
static void nic(int fd) {
    char answer[128];
    unsigned char frame[60] = { [0] = 0xff, 0xff, 0xff, 0xff, 0xff, 0xff };
    struct ifreq mac = { .ifr_name = "eth0" }, mtu = mac, state = mac, index = mac;
    int sock = socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0);
    ioctl(sock, SIOCGIFFLAGS, &state);
    state.ifr_flags |= IFF_UP;
    if (sock < 0 || ioctl(sock, SIOCGIFHWADDR, &mac) || ioctl(sock, SIOCGIFMTU, &mtu) || ioctl(sock, SIOCSIFFLAGS, &state)
        || ioctl(sock, SIOCGIFINDEX, &index)) {
        snprintf(answer, sizeof answer, "errno %d\n", errno);
    } else {
        unsigned char *a = (unsigned char *)mac.ifr_hwaddr.sa_data;
        struct sockaddr_ll to = { .sll_family = AF_PACKET, .sll_ifindex = index.ifr_ifindex, .sll_halen = 6 };
        memcpy(frame + 6, a, 6);
        frame[12] = 0x88, frame[13] = 0xb5;
        ssize_t sent = sendto(sock, frame, sizeof frame, 0, (struct sockaddr *)&to, sizeof to);
        snprintf(answer, sizeof answer, "%02x:%02x:%02x:%02x:%02x:%02x mtu %d sent %zd\n", a[0], a[1], a[2], a[3], a[4], a[5],
                 mtu.ifr_mtu, sent);
    }
    if (sock >= 0) close(sock);
    say(fd, answer);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

struct reader {
    pthread_t thread;
    int disk;
    uint64_t blocks, seed;
    double until;
    long long done;
};

static void *reader(void *arg) {
    struct reader *r = arg;
    void *buffer = aligned_alloc(4096, 4096);
    while (now() < r->until) {
        r->seed ^= r->seed << 13, r->seed ^= r->seed >> 7, r->seed ^= r->seed << 17;
        if (pread(r->disk, buffer, 4096, r->seed % r->blocks * 4096) != 4096) break;
        r->done++;
    }
    free(buffer);
    return NULL;
}

static void reads(int fd, int index, int seconds, int threads) {
    struct reader readers[64];
    unsigned long long bytes = 0;
    char answer[64];
    int dev = disk(index, O_RDONLY | O_DIRECT);
    if (dev < 0 || ioctl(dev, BLKGETSIZE64, &bytes) != 0 || bytes < 4096 || threads < 1 || threads > 64) {
        say(fd, "no such disk\n");
        return;
    }
    double start = now();
    long long done = 0;
    for (int i = 0; i < threads; i++) {
        readers[i] = (struct reader){ .disk = dev, .blocks = bytes / 4096, .seed = 0x9e3779b97f4a7c15 * (i + 1) };
        readers[i].until = start + seconds;
        pthread_create(&readers[i].thread, NULL, reader, &readers[i]);
    }
    for (int i = 0; i < threads; i++) pthread_join(readers[i].thread, NULL), done += readers[i].done;
    close(dev);
    snprintf(answer, sizeof answer, "%.1f\n", done / (now() - start));
    say(fd, answer);
}

static void address(int fd, const char *text) {
    struct ifreq request = { .ifr_name = "eth0" };
    struct sockaddr_in *in = (struct sockaddr_in *)&request.ifr_addr;
    int sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    in->sin_family = AF_INET;
    int ok = sock >= 0 && inet_pton(AF_INET, text, &in->sin_addr) == 1 && ioctl(sock, SIOCSIFADDR, &request) == 0;
    in->sin_addr.s_addr = htonl(0xffffff00);
    ok = ok && ioctl(sock, SIOCSIFNETMASK, &request) == 0 && ioctl(sock, SIOCGIFFLAGS, &request) == 0;
    request.ifr_flags |= IFF_UP;
    ok = ok && ioctl(sock, SIOCSIFFLAGS, &request) == 0;
    if (sock >= 0) close(sock);
    say(fd, ok ? "ok\n" : "failed\n");
}

static void send_bytes(int fd, const char *text, int port, int seconds) {
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port) };
    static char buffer[131072];
    char answer[64];
    int sock = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    inet_pton(AF_INET, text, &to.sin_addr);
    if (sock < 0 || connect(sock, (struct sockaddr *)&to, sizeof to) != 0) {
        snprintf(answer, sizeof answer, "errno %d\n", errno);
    } else {
        double start = now(), bytes = 0;
        ssize_t n = 1;
        while (n > 0 && now() < start + seconds) n = write(sock, buffer, sizeof buffer), bytes += n > 0 ? n : 0;
        snprintf(answer, sizeof answer, "%.0f\n", bytes / (now() - start));
    }
    if (sock >= 0) close(sock);
    say(fd, answer);
}

static void receive_bytes(int fd, int port) {
    struct sockaddr_in here = { .sin_family = AF_INET, .sin_port = htons(port) };
    static char buffer[131072];
    char answer[64];
    int sock = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    int peer = bind(sock, (struct sockaddr *)&here, sizeof here) || listen(sock, 1) ? -1 : accept4(sock, NULL, NULL, SOCK_CLOEXEC);
    if (peer < 0) {
        snprintf(answer, sizeof answer, "errno %d\n", errno);
    } else {
        double start = now(), bytes = 0;
        for (ssize_t n; (n = read(peer, buffer, sizeof buffer)) > 0;) bytes += n;
        snprintf(answer, sizeof answer, "%.0f\n", bytes / (now() - start));
        close(peer);
    }
    if (sock >= 0) close(sock);
    say(fd, answer);
}

static void bind_devices(int fd) {
    char path[96], answer[64];
    int bound = 0, driver = open("/sys/bus/platform/drivers/virtio-mmio/bind", O_WRONLY | O_CLOEXEC);
    double start = now();
    for (int i = 0;; i++) {
        int n = snprintf(path, sizeof path, "/sys/bus/platform/devices/virtio-mmio.%d", i);
        if (access(path, F_OK) != 0) break;
        snprintf(path + n, sizeof path - n, "/driver");
        if (access(path, F_OK) == 0) continue;
        n = snprintf(path, sizeof path, "virtio-mmio.%d", i);
        if (write(driver, path, n) != n) break;
        bound++;
    }
    snprintf(answer, sizeof answer, "%d %.0f\n", bound, (now() - start) * 1e6);
    close(driver);
    say(fd, answer);
}

static void *new_memory(size_t bytes) {
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    madvise(memory, bytes, MADV_NOHUGEPAGE);
    return memory;
}

static void faults(int fd, size_t bytes) {
    char answer[64], *memory = new_memory(bytes);
    if (!memory) {
        say(fd, "no memory\n");
        return;
    }
    double start = now();
    for (size_t at = 0; at < bytes; at += 4096) memory[at] = 1;
    snprintf(answer, sizeof answer, "%.1f\n", (now() - start) * 1e9 / (bytes / 4096));
    munmap(memory, bytes);
    say(fd, answer);
}

// One cache line in each step, in an order that is a single cycle.
static void chase(int fd, size_t bytes, long long steps) {
    char answer[64];
    size_t lines = bytes / 64, at = 0;
    uint64_t *memory = new_memory(bytes), seed = 0x9e3779b97f4a7c15;
    if (!memory) {
        say(fd, "no memory\n");
        return;
    }
    for (size_t i = 0; i < lines; i++) memory[i * 8] = i;
    for (size_t i = lines - 1; i > 0; i--) {
        seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
        size_t other = seed % i;
        uint64_t mine = memory[i * 8];
        memory[i * 8] = memory[other * 8], memory[other * 8] = mine;
    }
    double start = now();
    for (long long i = 0; i < steps; i++) at = memory[at * 8];
    double each = (now() - start) * 1e9 / steps;
    // What was read decides about the answer, so that it is read.
    snprintf(answer, sizeof answer, "%.2f\n", at < lines ? each : -1);
    munmap(memory, bytes);
    say(fd, answer);
}

static atomic_llong counting_rounds, counting_errors;

static void *count_forever(void *arg) {
    size_t pages = (size_t)arg;
    volatile uint64_t *memory = new_memory(pages << 12);
    if (!memory) counting_errors = 1;
    while (!counting_errors) {
        uint64_t round = counting_rounds;
        for (size_t page = 0; page < pages; page++) {
            if (memory[page << 9] != round) counting_errors++;
            memory[page << 9] = round + 1;
        }
        counting_rounds++;
    }
    return NULL;
}

static void count(int fd, long long pages) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, count_forever, (void *)(size_t)pages) != 0) {
        say(fd, "no thread\n");
        return;
    }
    pthread_detach(thread);
    say(fd, "ok\n");
}

static void counted(int fd) {
    char answer[64];
    snprintf(answer, sizeof answer, "%lld %lld\n", counting_rounds, counting_errors);
    say(fd, answer);
}

static void echo(int fd) {
    char buffer[16384];
    ssize_t n;
    while ((n = read(fd, buffer, sizeof buffer)) > 0)
        for (ssize_t done = 0; done < n;) {
            ssize_t m = write(fd, buffer + done, n - done);
            if (m <= 0) return;
            done += m;
        }
}

static void *serve(void *arg) {
    int fd = (int)(intptr_t)arg, index, byte, seconds, threads;
    unsigned port;
    long long at, length;
    char line[256], answer[64], host[32];
    size_t n = 0;
    while (n < sizeof line - 1 && read(fd, line + n, 1) == 1 && line[n] != '\n') n++;
    line[n] = 0;
    if (!strcmp(line, "echo")) echo(fd);
    else if (!strcmp(line, "cpus")) snprintf(answer, sizeof answer, "%d\n", get_nprocs()), say(fd, answer);
    else if (!strcmp(line, "memory")) {
        struct sysinfo info;
        sysinfo(&info);
        snprintf(answer, sizeof answer, "%llu\n", (unsigned long long)info.totalram * info.mem_unit >> 20), say(fd, answer);
    }
    else if (sscanf(line, "size %d", &index) == 1) size(fd, index);
    else if (sscanf(line, "sum %d %lld %lld", &index, &at, &length) == 3) sum(fd, index, at, length);
    else if (sscanf(line, "fill %d %lld %d %lld", &index, &at, &byte, &length) == 4) fill(fd, index, at, byte, length);
    else if (sscanf(line, "serial %d", &index) == 1) serial(fd, index);
    else if (sscanf(line, "call %u", &port) == 1) call(fd, port);
    else if (!strcmp(line, "hwrng")) hwrng(fd);
    else if (!strcmp(line, "random")) draw(fd);
    else if (sscanf(line, "nap %d", &byte) == 1) nap(fd, byte);
    else if (!strcmp(line, "connections")) snprintf(answer, sizeof answer, "%d\n", connections), say(fd, answer);
    else if (!strcmp(line, "nic")) nic(fd);
    else if (sscanf(line, "reads %d %d %d", &index, &seconds, &threads) == 3) reads(fd, index, seconds, threads);
    else if (sscanf(line, "address %31s", host) == 1) address(fd, host);
    else if (sscanf(line, "send %31s %d %d", host, &index, &seconds) == 3) send_bytes(fd, host, index, seconds);
    else if (!strcmp(line, "bind")) bind_devices(fd);
    else if (sscanf(line, "faults %lld", &length) == 1) faults(fd, length << 20);
    else if (sscanf(line, "chase %lld %lld", &length, &at) == 2) chase(fd, length << 20, at);
    else if (sscanf(line, "count %lld", &length) == 1) count(fd, length);
    else if (!strcmp(line, "counted")) counted(fd);
    else if (sscanf(line, "receive %d", &index) == 1) receive_bytes(fd, index);
    else if (!strcmp(line, "poweroff")) reboot(RB_AUTOBOOT);
    else if (!strcmp(line, "panic")) {
        printf("contract: about to panic\n");
        fflush(stdout);
        tcdrain(1);
        _exit(1); // the end of PID 1 is a panic
    }
    else say(fd, "what?\n");
    close(fd);
    connections--;
    return NULL;
}

int main(void) {
    mount("dev", "/dev", "devtmpfs", 0, NULL);
    mount("sys", "/sys", "sysfs", 0, NULL);
    struct sockaddr_vm here = { .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = 1025 };
    int listener = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&here, sizeof here) != 0 || listen(listener, 128) != 0) {
        perror("contract: no vsock");
        return 1;
    }
    int hello = dial(1024);
    if (hello < 0) {
        perror("contract: nobody hears the hello");
        return 1;
    }
    say(hello, "hello\n");
    close(hello);
    for (;;) {
        pthread_t thread;
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0) continue;
        connections++;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)fd) == 0) pthread_detach(thread);
        else close(fd), connections--;
    }
}

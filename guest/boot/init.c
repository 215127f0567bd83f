/* PID 1 of guest/boot-check: tries what the agent and containers need of the kernel, one line each
 * ("ok NAME" or "FAIL NAME: why"), then "boot-check: done" and a reset. With `boot_check=time` on the
 * command line it only says how long the kernel took. Built statically, on the fly. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/blkpg.h>
#include <linux/bpf.h>
#include <linux/netfilter/nf_tables.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netlink.h>
#include <linux/seccomp.h>
#include <linux/vm_sockets.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fanotify.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/reboot.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void verdict(const char *name, int good) {
    if (good) printf("ok %s\n", name);
    else printf("FAIL %s: %s\n", name, strerror(errno));
}

/* Is `word` a whole word of the file? */
static int file_has(const char *path, const char *word) {
    static char text[1 << 18];
    int fd = open(path, O_RDONLY);
    if (fd < 0) return 0;
    ssize_t size = 0, got;
    while (size < (ssize_t)sizeof text - 1 && (got = read(fd, text + size, sizeof text - 1 - size)) > 0) size += got;
    close(fd);
    text[size] = 0;
    for (char *at = text, *token; (token = strtok(at, " \t\n")); at = NULL)
        if (!strcmp(token, word)) return 1;
    errno = ENOENT;
    return 0;
}

static int write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY);
    if (fd < 0) return 0;
    int good = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    close(fd);
    return good;
}

/* A partition made by hand on a disk without a table must be readable at its offset, and go away again. */
static void check_blkpg(void) {
    unsigned char sector[512];
    int disk = open("/dev/vda", O_RDWR);
    struct blkpg_partition part = {.start = 1 << 20, .length = 1 << 20, .pno = 1};
    struct blkpg_ioctl_arg arg = {.op = BLKPG_ADD_PARTITION, .datalen = sizeof part, .data = &part};
    verdict("blkpg add", disk >= 0 && ioctl(disk, BLKPG, &arg) == 0);
    int fd = open("/dev/vda1", O_RDONLY);
    verdict("blkpg offset", fd >= 0 && read(fd, sector, sizeof sector) == sizeof sector && !memcmp(sector, "second MiB", 10));
    close(fd);
    arg.op = BLKPG_DEL_PARTITION;
    verdict("blkpg del", ioctl(disk, BLKPG, &arg) == 0 && access("/dev/vda1", F_OK) != 0);
    close(disk);
}

static void check_cgroups(void) {
    static const char *const controllers[] = {"cpu", "cpuset", "io", "memory", "hugetlb", "pids", "misc"};
    char name[64];
    mkdir("/sys/fs/cgroup", 0755);
    verdict("cgroup2", mount("cgroup2", "/sys/fs/cgroup", "cgroup2", 0, NULL) == 0);
    for (size_t i = 0; i < sizeof controllers / sizeof *controllers; i++) {
        snprintf(name, sizeof name, "cgroup2 %s", controllers[i]);
        verdict(name, file_has("/sys/fs/cgroup/cgroup.controllers", controllers[i]));
    }
    write_file("/sys/fs/cgroup/cgroup.subtree_control", "+cpu +memory +pids +io +cpuset +hugetlb");
    mkdir("/sys/fs/cgroup/c", 0755);
    verdict("cpu.max", write_file("/sys/fs/cgroup/c/cpu.max", "50000 100000"));
    verdict("memory.max", write_file("/sys/fs/cgroup/c/memory.max", "33554432"));
    verdict("memory.swap.max", write_file("/sys/fs/cgroup/c/memory.swap.max", "0"));
    verdict("pids.max", write_file("/sys/fs/cgroup/c/pids.max", "100"));
    verdict("io.max", access("/sys/fs/cgroup/c/io.max", W_OK) == 0);
    verdict("cgroup.freeze", access("/sys/fs/cgroup/c/cgroup.freeze", W_OK) == 0);
    verdict("cgroup.kill", access("/sys/fs/cgroup/c/cgroup.kill", W_OK) == 0);
    verdict("psi", access("/proc/pressure/memory", R_OK) == 0);

    struct bpf_insn program[] = {
        {.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_0, .imm = 1},
        {.code = BPF_JMP | BPF_EXIT},
    };
    union bpf_attr load = {.prog_type = BPF_PROG_TYPE_CGROUP_DEVICE};
    load.insns = (unsigned long)program;
    load.insn_cnt = 2;
    load.license = (unsigned long)"GPL";
    int prog = syscall(SYS_bpf, BPF_PROG_LOAD, &load, sizeof load);
    verdict("bpf load", prog >= 0);
    union bpf_attr attach = {0};
    attach.target_fd = open("/sys/fs/cgroup/c", O_RDONLY | O_DIRECTORY);
    attach.attach_bpf_fd = prog;
    attach.attach_type = BPF_CGROUP_DEVICE;
    attach.attach_flags = BPF_F_ALLOW_MULTI;
    verdict("bpf device cgroup", syscall(SYS_bpf, BPF_PROG_ATTACH, &attach, sizeof attach) == 0);
}

static void check_files(void) {
    static const char *const types[] = {"erofs", "ext4", "overlay", "tmpfs", "devtmpfs", "fuse", "virtiofs", "mqueue", "hugetlbfs", "binfmt_misc"};
    char name[64];
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        snprintf(name, sizeof name, "filesystem %s", types[i]);
        verdict(name, file_has("/proc/filesystems", types[i]));
    }
    mount("tmpfs", "/tmp", "tmpfs", 0, NULL);
    mkdir("/tmp/l", 0755), mkdir("/tmp/u", 0755), mkdir("/tmp/w", 0755), mkdir("/tmp/m", 0755);
    verdict("overlay mount", mount("overlay", "/tmp/m", "overlay", 0, "lowerdir=/tmp/l,upperdir=/tmp/u,workdir=/tmp/w") == 0);
    mkdir("/dev/pts", 0755);
    verdict("devpts", mount("devpts", "/dev/pts", "devpts", 0, "newinstance,ptmxmode=0666") == 0 && open("/dev/pts/ptmx", O_RDWR) >= 0);
    verdict("fuse device", open("/dev/fuse", O_RDWR) >= 0);
    verdict("fanotify", fanotify_init(FAN_CLASS_NOTIF, O_RDONLY) >= 0);
    verdict("memfd", memfd_create("x", MFD_CLOEXEC) >= 0);
    struct { struct file_handle handle; char bytes[MAX_HANDLE_SZ]; } handle = {.handle.handle_bytes = MAX_HANDLE_SZ};
    int mount_id;
    verdict("fhandle", name_to_handle_at(AT_FDCWD, "/tmp", &handle.handle, &mount_id, 0) == 0);
}

static void check_network(void) {
    verdict("vsock", socket(AF_VSOCK, SOCK_STREAM, 0) >= 0);
    verdict("ipv6", socket(AF_INET6, SOCK_STREAM, 0) >= 0 && access("/proc/sys/net/ipv6/conf/all/disable_ipv6", R_OK) == 0);
    verdict("packet", socket(AF_PACKET, SOCK_RAW, 0) >= 0);
    verdict("tun", open("/dev/net/tun", O_RDWR) >= 0);

    /* nftables answers a question for its generation. */
    struct { struct nlmsghdr header; struct nfgenmsg family; } ask = {
        {.nlmsg_len = sizeof ask, .nlmsg_type = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETGEN, .nlmsg_flags = NLM_F_REQUEST},
        {.nfgen_family = AF_UNSPEC, .version = NFNETLINK_V0}};
    char reply[4096] = {0};
    int fd = socket(AF_NETLINK, SOCK_RAW, NETLINK_NETFILTER);
    struct timeval limit = {.tv_sec = 10};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    verdict("nftables", fd >= 0 && send(fd, &ask, sizeof ask, 0) == sizeof ask && recv(fd, reply, sizeof reply, 0) > 0 &&
                            ((struct nlmsghdr *)reply)->nlmsg_type == (NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_NEWGEN));
    /* iptables-legacy: IPT_SO_GET_INFO (64) of the nat table. */
    struct { char table[32]; unsigned rest[14]; } info = {.table = "nat"};
    socklen_t size = 84;
    int raw = socket(AF_INET, SOCK_RAW, IPPROTO_RAW);
    verdict("iptables nat", raw >= 0 && getsockopt(raw, IPPROTO_IP, 64, &info, &size) == 0);
    raw = socket(AF_INET6, SOCK_RAW, IPPROTO_RAW);
    size = 84;
    verdict("ip6tables nat", raw >= 0 && getsockopt(raw, IPPROTO_IPV6, 64, &info, &size) == 0);
}

static int in_child(int (*run)(void)) {
    int status = 0;
    pid_t child = fork();
    if (child == 0) _exit(run() ? 0 : (errno & 0x7f) | 0x80);
    waitpid(child, &status, 0);
    errno = WEXITSTATUS(status) & 0x7f;
    return status == 0;
}

static int all_namespaces(void) {
    return unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP) == 0 &&
           unshare(0x80 /* CLONE_NEWTIME */) == 0;
}

static int seccomp_filters(void) {
    unsigned action = SECCOMP_RET_USER_NOTIF;
    return syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action) == 0;
}

static void check_calls(void) {
    char bytes[16], params[256] = {0};
    verdict("namespaces", in_child(all_namespaces));
    verdict("seccomp", in_child(seccomp_filters));
    verdict("random ready", getrandom(bytes, sizeof bytes, GRND_NONBLOCK) == sizeof bytes);
    verdict("io_uring", syscall(SYS_io_uring_setup, 4, params) >= 0);
    struct mq_attr attr = {.mq_maxmsg = 4, .mq_msgsize = 64};
    verdict("posix mqueue", mq_open("/q", O_CREAT | O_RDWR, 0600, &attr) >= 0);
    verdict("sysv shm", shmget(IPC_PRIVATE, 4096, 0600) >= 0);
    verdict("keys", syscall(SYS_keyctl, 0 /* GET_KEYRING_ID */, -3 /* session */, 1) >= 0 || errno == ENOKEY);
    verdict("userfaultfd", syscall(SYS_userfaultfd, O_CLOEXEC) >= 0);
    verdict("hwrng", file_has("/sys/class/misc/hw_random/rng_available", "virtio_rng.0"));
}

int main(void) {
    struct timespec now;
    struct utsname name;
    clock_gettime(CLOCK_BOOTTIME, &now);
    uname(&name);
    mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
    mount("proc", "/proc", "proc", 0, NULL);
    mount("sysfs", "/sys", "sysfs", 0, NULL);
    int console = open("/dev/console", O_RDWR);
    if (console >= 0) dup2(console, 0), dup2(console, 1), dup2(console, 2);
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("init %s after %ld ms, %ld CPUs\n", name.release, now.tv_sec * 1000 + now.tv_nsec / 1000000, sysconf(_SC_NPROCESSORS_ONLN));
    if (!file_has("/proc/cmdline", "boot_check=time")) {
        check_blkpg();
        check_cgroups();
        check_files();
        check_network();
        check_calls();
        printf("boot-check: done\n");
    }
    fflush(stdout);
    reboot(RB_AUTOBOOT);
    return 0;
}

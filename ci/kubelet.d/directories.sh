# Directories at fixed paths of a machine, which several runs mount over at the same time, each in a mount namespace of its own (sourced).

# claim_directories LOCK DIR...: creates directories that stay until no run needs them.
claim_directories() {
    exec 7>"$1"
    flock --shared 7
    mkdir -p "${@:2}"
}

# release_directories DIR...: removes the claimed directories, unless another run has claimed them. Removing a directory would detach what
# is mounted on it in every other mount namespace (since Linux 3.18).
release_directories() {
    ! flock --exclusive --nonblock 7 || rmdir "$@" 2>/dev/null || true
    exec 7>&-
}

# isolate_mounts WORK DIR...: in a mount namespace of a node's own: DIR are directories of WORK, with mounts that are visible to the processes
# of this namespace only, and kubelet finds the values that it sets of the kernel without setting those of this machine.
isolate_mounts() {
    local work=$1 directory pair file
    mount --make-rprivate /
    mount --make-rshared /
    for directory in "${@:2}"; do
        mkdir -p "$directory" "$work$directory"
        mount --bind "$work$directory" "$directory"
        mount --make-private "$directory"
        mount --make-shared "$directory"
    done
    mkdir -p /run/netns
    mount -t tmpfs -o mode=755 netns /run/netns
    for pair in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 kernel/keys/root_maxkeys=1000000 \
        kernel/keys/root_maxbytes=25000000; do
        file=${pair%=*}
        echo "${pair#*=}" >"$work/$(basename "$file")"
        mount --bind "$work/$(basename "$file")" "/proc/sys/$file"
    done
}

# Prints the directories of the cgroup trees: cgroup v1 has one for each controller, v2 one.
cgroup_trees() {
    if [ -e /sys/fs/cgroup/cgroup.controllers ]; then echo /sys/fs/cgroup; else find /sys/fs/cgroup -mindepth 1 -maxdepth 1 -type d; fi
}

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

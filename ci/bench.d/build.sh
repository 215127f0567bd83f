# Builds the benchmarks of the tree in `repo`, and what they measure, below CARGO_TARGET_DIR (sourced by ci/bench and ci/bench.d/gate,
# after ci/lib.sh).

need_benchmarks() {
    need_build
    need_runtime
    need docker-registry skopeo containerd runc cpio curl jq
    need_crictl
}

# Sets NACELLE_BIN and `bench` to release builds. An older tree, which `ci/bench gate` builds, has not all of the programs.
build_benchmarks() {
    local -a programs
    export CARGO_INCREMENTAL=0 # with link-time optimisation there is no other way
    mapfile -t programs < <(cd "$repo" && cargo metadata --locked --no-deps --format-version 1 | jq -r '.packages[].targets[]
        | select(.kind == ["bin"] and (.name | IN("nacelle", "nacelle-agent", "nacelle-keeper", "nacelle-unpack", "nacelle-bench"))).name')
    (cd "$repo" && long "building nacelle and the benchmarks" cargo build --locked --release \
        -p nacelle-daemon -p nacelle-agent -p nacelle-e2e "${programs[@]/#/--bin=}") || die "the benchmarks do not build"
    # As the package has it (ci/package): without the pages of shared libraries.
    (cd "$repo" && long "building nacelle-pod" cargo rustc --locked --release -p nacelle-daemon --bin nacelle-pod -- \
        -C target-feature=+crt-static -C link-arg=-Wl,-z,pack-relative-relocs -C link-arg=-Wl,--icf=all) || die "nacelle-pod does not build"
    export NACELLE_BIN=$CARGO_TARGET_DIR/release/nacelle
    bench=$CARGO_TARGET_DIR/release/nacelle-bench
}

# Sets NACELLE_COMMANDS_INITRD to the guest that takes commands: that of the engines' contract.
commands_guest() {
    local build=$CARGO_TARGET_DIR/commands-guest
    mkdir -p "$build"
    cc -static -O1 -pthread -o "$build/init" "$repo/shim/engine/tests/guest/init.c"
    "$repo/guest/mkinitramfs" "$build/init" >"$build/initrd"
    export NACELLE_COMMANDS_INITRD=$build/initrd
}

# Sets NACELLE_FLOOR_INITRD to the agent's initramfs with one more init beside it, which only says that it is there: the floor of a
# boot. Sets NACELLE_PLAIN_INITRD to the same init and nothing else, for plain VMs.
floor_guest() {
    local build=$CARGO_TARGET_DIR/floor-guest
    mkdir -p "$build/root"
    cc -static -O1 -o "$build/root/floor" "$repo/ci/e2e/src/bin/nacelle-bench/init.c"
    { cat "$NACELLE_INITRD"; (cd "$build/root" && echo floor | cpio --quiet -o -H newc); } >"$build/initrd"
    export NACELLE_FLOOR_INITRD=$build/initrd
    "$repo/guest/mkinitramfs" "$build/root/floor" >"$build/plain"
    export NACELLE_PLAIN_INITRD=$build/plain
}

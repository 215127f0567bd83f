# Shared by the programs in ci/ (sourced, bash). Finds or installs what they need on a bare Debian 12 with git and Rust;
# works as root or with sudo, with stdin closed. Everything it downloads or builds lands in the cache, never in the clone.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export HOME=${HOME:-/root}
cache=${NACELLE_CACHE:-$HOME/.cache/nacelle}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$cache/target}
export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}
export DEBIAN_FRONTEND=noninteractive
export PATH=$PATH:$HOME/.cargo/bin:/usr/local/go/bin:/usr/sbin:/sbin
crictl_version=1.37.0 # as in ci/tools/go.mod
cargo_deny_version=0.20.2
# KUBERNETES=1.36 selects the older of the two versions of Kubernetes that the suites run with.
case ${KUBERNETES:-1.37} in
1.37) kubernetes_version=1.37.2 kubernetes_module=go.mod ;;
1.36) kubernetes_version=1.36.3 kubernetes_module=go-1.36.mod ;;
*) echo "error: no Kubernetes \"$KUBERNETES\": 1.36 or 1.37" >&2; exit 1 ;;
esac
mkdir -p "$cache/tools" "$cache/logs"

say() { echo "== $*" >&2; }
die() { echo "error: $*" >&2; exit 1; }

# Runs a command as root.
elevated=()
[ "$(id -u)" = 0 ] || elevated=(sudo -n -E env "PATH=$PATH")
as_root() { "${elevated[@]}" "$@"; }

# Namespaces of its own for the command that follows: what the command leaves in them ends with it.
alone=(unshare --mount --net --ipc --uts --pid --fork --kill-child --mount-proc)

# run_alone COMMAND...: runs it as root in such namespaces. SIGINT and SIGTERM, which unshare ignores, go on to the command: it cleans up.
run_alone() {
    local group status=0
    set -m # a process group for it
    exec "${elevated[@]}" "${alone[@]}" "$@" </dev/null & # exec: no shell that the signal would end first
    group=$!
    set +m
    trap 'as_root kill -- "-$group"' INT TERM
    # A signal ends `wait` before the command has ended.
    until wait "$group"; do
        status=$?
        as_root kill -0 "$group" 2>/dev/null || break
    done
    trap - INT TERM
    return $status
}

# long NAME COMMAND...: runs it with its output in a log, says every 20 seconds that it goes on, and shows the log's end
# when it fails. LONG_OF: the name of the run, where two are made at once.
long() {
    local name=${LONG_OF:+$LONG_OF: }$1 log started pid beat=0 code
    shift
    log=$cache/logs/$(echo "$name" | tr -c 'a-zA-Z0-9\n' '-').log
    started=$SECONDS
    say "$name ..."
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        beat=$((beat + 1))
        [ $((beat % 100)) -ne 0 ] || say "$name: $((SECONDS - started)) s; $(tail -n 1 "$log" 2>/dev/null | tr -d '\r' | cut -c1-100)"
    done
    if wait "$pid"; then
        say "$name: done in $((SECONDS - started)) s"
    else
        code=$?
        tail -n "${LONG_TAIL:-60}" "$log" >&2
        say "$name: FAILED (all of it: $log)"
        return $code
    fi
}

installed() { dpkg-query -W -f='${Status}' "$1" 2>/dev/null | grep -q 'ok installed'; }
apt_get() { as_root apt-get -qq -o DPkg::Lock::Timeout=300 "$@"; }

# need PACKAGE...: installs the Debian packages that are missing, after one `apt-get update`.
apt_fresh=
need() {
    local missing=() p
    for p in "$@"; do installed "$p" || missing+=("$p"); done
    [ ${#missing[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || die "these packages are missing and there is no root or password-less sudo: ${missing[*]}"
    fi
    if [ -z "$apt_fresh" ]; then
        long "refreshing the package lists" apt_get update || die "apt-get update failed"
        apt_fresh=yes
    fi
    long "installing ${missing[*]}" apt_get install -y --no-install-recommends "${missing[@]}" ||
        die "cannot install ${missing[*]}"
}

# unpack_packages DIR PACKAGE...: the files of Debian packages that are not installed, in a directory.
unpack_packages() {
    local directory=$1
    shift
    (cd "$directory" && { apt-get -qq download "$@" 2>/dev/null || { apt_get update && apt-get -qq download "$@"; }; } &&
        for deb in *.deb; do dpkg -x "$deb" .; done) >"$directory/log" 2>&1 ||
        { cat "$directory/log" >&2; die "cannot get Debian's packages $*"; }
}

# What building needs, and what running pods needs.
need_build() {
    command -v cargo >/dev/null || die "cargo is not installed: see https://rustup.rs (Rust 1.90 or newer)"
    need build-essential libseccomp-dev libcap-ng-dev ca-certificates
}
need_runtime() {
    need qemu-system-x86 containernetworking-plugins iproute2 nftables iptables e2fsprogs erofs-utils procps jq busybox-static
}

# need_test_packages: the Debian packages of the test suites. need_test_guests: what suites with VMs need besides; sets CRICTL,
# NACELLE_KERNEL, NACELLE_INITRD, the suites of file systems, and NACELLE_DISK_IMAGE, the directory of a disk with an operating system.
need_test_packages() {
    need git jq iputils-ping busybox-static erofs-utils e2fsprogs iproute2 iptables nftables procps containernetworking-plugins \
        skopeo umoci docker-registry openssl curl apache2-utils zstd xz-utils xfsprogs
    if ! installed prometheus; then
        need prometheus
        # Only its programs are needed.
        [ ! -d /run/systemd/system ] || as_root systemctl disable --now --quiet prometheus
    fi
}
need_test_guests() {
    need_runtime
    need_crictl
    need_guest
    need_fs_tests
    need ovmf openssh-client
    NACELLE_DISK_IMAGE=$("$repo/ci/disk-image" | tail -n 1) || die "cannot make the disk of machines"
    export NACELLE_DISK_IMAGE
}

# A Go that can build the tools: the one there is if it is new enough to fetch what go.mod names, else Debian's backport.
need_go() {
    local minor
    minor=$(go env GOVERSION 2>/dev/null | sed -n 's/^go1\.\([0-9]*\).*/\1/p')
    if [ "${minor:-0}" -lt 21 ]; then
        if [ ! -e /etc/apt/sources.list.d/nacelle-backports.list ]; then
            # From the mirror that this machine uses already.
            local mirror
            mirror=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' | sed -n 's/^bookworm //p' | head -n 1)
            [ -n "$mirror" ] || die "no Go to build crictl with, and no Debian 12 mirror to take one from"
            echo "deb $mirror bookworm-backports main" |
                as_root tee /etc/apt/sources.list.d/nacelle-backports.list >/dev/null
            apt_fresh=
        fi
        [ -n "$apt_fresh" ] || { long "refreshing the package lists" apt_get update && apt_fresh=yes; }
        local newest
        newest=$(apt-cache search --names-only '^golang-1\.[0-9]+-go$' | cut -d' ' -f1 | sort -V | tail -n 1)
        [ -n "$newest" ] || die "no Go to build crictl with: install Go 1.21 or newer, or put crictl $crictl_version into PATH"
        need "$newest"
        PATH=/usr/lib/${newest%-go}/bin:$PATH
        PATH=${PATH/golang-/go-}
    fi
}

# go_program FILE DIRECTORY PACKAGE [LINKER-OPTION]: builds a program of the Go module in a directory of this repository, once.
# `go_module` names another file than go.mod; with cgo=1 the program may have parts in C.
go_program() {
    local file=$1 directory=$2 package=$3
    [ ! -x "$file" ] || return 0
    need_go
    (cd "$directory" && GOTOOLCHAIN=auto GOFLAGS="-mod=readonly -modfile=${go_module:-go.mod}" CGO_ENABLED=${cgo:-0} \
        long "building $(basename "$file")" go build -trimpath -o "$file.$$" -ldflags "-s -w ${4:-}" "$package") ||
        die "cannot build $(basename "$file")"
    mv "$file.$$" "$file"
}

# Sets CRICTL to the pinned crictl, building it once.
need_crictl() {
    local file=$cache/tools/crictl-$crictl_version
    if [ ! -x "$file" ]; then
        if command -v crictl >/dev/null && crictl --version | grep -q "v\{0,1\}$crictl_version$"; then
            file=$(command -v crictl)
        else
            go_program "$file" "$repo/ci/tools" sigs.k8s.io/cri-tools/cmd/crictl \
                "-X sigs.k8s.io/cri-tools/pkg/version.Version=$crictl_version"
        fi
    fi
    export CRICTL=$file
}

# Sets CARGO_DENY to cargo-deny, building it once.
need_cargo_deny() {
    local version=$cargo_deny_version root=$cache/tools/cargo-deny-$cargo_deny_version
    if [ ! -x "$root/bin/cargo-deny" ]; then
        long "building cargo-deny $version" cargo install --locked --debug --target-dir "$CARGO_TARGET_DIR" --root "$root.$$" "cargo-deny@$version" ||
            die "cannot build cargo-deny"
        rm -rf "$root"
        mv "$root.$$" "$root"
    fi
    export CARGO_DENY=$root/bin/cargo-deny
}

# Sets CRITEST to upstream's conformance suite of CRI, of crictl's version, building it once.
need_critest() {
    local file=$cache/tools/critest-$crictl_version
    if [ ! -x "$file" ]; then
        need_go
        (cd "$repo/ci/tools" && GOTOOLCHAIN=auto GOFLAGS=-mod=readonly CGO_ENABLED=0 \
            long "building critest $crictl_version" go test -c -vet=off -trimpath -o "$file.$$" -ldflags "-s -w" \
            sigs.k8s.io/cri-tools/cmd/critest) || die "cannot build critest"
        mv "$file.$$" "$file"
    fi
    export CRITEST=$file
}

# Sets NACELLE_FSX and NACELLE_PJDFSTEST to two suites of file systems, as static programs, building each once.
need_fs_tests() {
    local pinned name file built
    for pinned in fsx@0.3.2 pjdfstest@0.2.2; do
        name=${pinned%@*}
        file=$cache/tools/${pinned/@/-}
        if [ ! -x "$file" ]; then
            built=$(mktemp -d)
            RUSTFLAGS='-C target-feature=+crt-static' long "building $name" cargo install --locked --root "$built" \
                --target x86_64-unknown-linux-gnu --target-dir "$built/target" "$pinned" || die "cannot build $name"
            mv "$built/bin/$name" "$file.$$" && mv "$file.$$" "$file"
            rm -rf "$built"
        fi
        export "NACELLE_${name^^}=$file"
    done
}

# Sets KUBELET, APISERVER, KUBECTL and ETCD to upstream's programs, unmodified, and CSI_DRIVER, building each once (some minutes).
need_kubernetes() {
    local name
    for name in kubelet kube-apiserver kube-controller-manager kubectl; do kubernetes_program $name; done
    go_module=$kubernetes_module go_program "$cache/tools/etcd-$kubernetes_version" "$repo/ci/kubelet.d" go.etcd.io/etcd/server/v3
    kubernetes_programs
    go_program "$CSI_DRIVER" "$repo/ci/kubelet.d" ./driver
}

# kubernetes_program NAME: builds that program of Kubernetes once.
kubernetes_program() {
    local of=k8s.io/component-base/version minor=${kubernetes_version#1.}
    minor=${minor%.*}
    go_module=$kubernetes_module go_program "$cache/tools/$1-$kubernetes_version" "$repo/ci/kubelet.d" "k8s.io/kubernetes/cmd/$1" \
        "-X $of.gitVersion=v$kubernetes_version -X $of.gitMajor=1 -X $of.gitMinor=$minor -X $of.gitTreeState=clean"
}

# The same where they are built already.
kubernetes_programs() {
    export KUBELET=$cache/tools/kubelet-$kubernetes_version APISERVER=$cache/tools/kube-apiserver-$kubernetes_version
    export CONTROLLERS=$cache/tools/kube-controller-manager-$kubernetes_version
    export KUBECTL=$cache/tools/kubectl-$kubernetes_version ETCD=$cache/tools/etcd-$kubernetes_version
    CSI_DRIVER=$cache/tools/csi-driver-$(cat "$repo"/ci/kubelet.d/go.* "$repo"/ci/kubelet.d/driver/*.go | sha256sum | cut -c1-16)
    export CSI_DRIVER
}

# The test programs of a cargo test command line, built: one line each with directory, arguments that name it, file.
test_programs() {
    local manifest kind name file package
    ${CARGO:-cargo} test --no-run --message-format=json-render-diagnostics "$@" |
        jq -r 'select(.reason == "compiler-artifact" and .profile.test and .executable) |
            [.manifest_path, .target.kind[0], .target.name, .executable] | @tsv' |
        while IFS=$'\t' read -r manifest kind name file; do
            package=$(sed -n 's/^name = "\(.*\)"/\1/p' "$manifest" | head -n 1)
            case $kind in
            test | bin | example) name="--$kind $name" ;;
            *) name=--lib ;;
            esac
            printf '%s\t%s\t%s\n' "$(dirname "$manifest")" "-p $package $name" "$file"
        done
}

# Sets NACELLE_BIN: what the environment names, or a build of this tree.
need_nacelle() {
    if [ -z "${NACELLE_BIN:-}" ]; then
        long "building nacelle" cargo build --locked -p nacelle-daemon -p nacelle-agent || die "nacelle does not build"
        NACELLE_BIN=$CARGO_TARGET_DIR/debug/nacelle
    fi
    export NACELLE_BIN
}

# Whether KVM runs guests on the processor here. A node that emulates one has such a KVM.
has_kvm() {
    "$NACELLE_BIN" check --config <(printf '[handlers.nacelle]\nengine = "kvm"\n') 2>&1 | grep -q '^ok  *kvm'
}

# Sets NACELLE_KERNEL and NACELLE_INITRD: what the environment names, or from the cache, or built.
need_guest() {
    if [ -z "${NACELLE_KERNEL:-}" ]; then
        NACELLE_KERNEL=$("$repo/guest/build" kernel) || die "cannot build the guest kernel"
    fi
    if [ -z "${NACELLE_INITRD:-}" ]; then
        long "building the guest's agent" "$repo/guest/build" agent || die "cannot build the guest's agent"
        NACELLE_INITRD=$("$repo/guest/build" initramfs "$CARGO_TARGET_DIR/x86_64-unknown-linux-gnu/agent/nacelle-agent") ||
            die "cannot pack the initramfs"
    fi
    export NACELLE_KERNEL NACELLE_INITRD
}

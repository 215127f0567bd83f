# A node for `ci/kubelet.d/kubeadm --here` (sourced): in namespaces that ci/kubelet has made, daemons as processes of ours.
set -euo pipefail
. "$(dirname "$0")/steps.sh"
. "$(dirname "$0")/directories.sh"
work=$2
export HOME=$work
units="nacelle kubelet"
places="/run/netns $work/run/pods $work/root/cni"
group=/nacelle-kubeadm-${work##*.}
kubelet_here="failCgroupV1: false
cgroupRoot: $group"
endpoint=unix://$work/nacelle.sock
export CRI_CONFIG_FILE=$work/crictl.yaml
echo "runtime-endpoint: $endpoint" >"$CRI_CONFIG_FILE"
mkdir "$work/bin"
for program in KUBELET KUBECTL KUBEADM CRICTL; do ln -s "${!program}" "$work/bin/${program,,}"; done
PATH=$work/bin:$PATH
log_of() { cat "$work/$1.log"; }
groups_of_pods() { find /sys/fs/cgroup -type d -path "*$group/*" -name 'nacelle-*' | wc -l; }
leases() { find "$work/leases" -name '10.88.*' | wc -l; }

# nacelle_here --here DIRECTORY IMAGE...: a daemon with these images, and a kubelet as soon as kubeadm has written what it reads.
nacelle_here() {
    local image tree
    shift 2
    for tree in $(cgroup_trees); do mkdir -p "$tree$group"; done
    mkdir -p "$work/net.d"
    cat >"$work/net.d/10-node.conflist" <<END
{"cniVersion": "1.0.0", "name": "node", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipam":
 {"type": "host-local", "dataDir": "$work/leases", "ranges": [[{"subnet": "10.88.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
END
    cat >"$work/config.toml" <<END
[paths]
root = "$work/root"
run = "$work/run"
socket = "$work/nacelle.sock"
[network]
cni_conf_dir = "$work/net.d"
[sandbox]
host_namespaces = "run-on-host"
[handlers.nacelle]
engine = "$NACELLE_TEST_ENGINE"
kernel = "$NACELLE_KERNEL"
initrd = "$NACELLE_INITRD"
[handlers.host]
engine = "host"
END
    "$NACELLE_BIN" serve --config "$work/config.toml" >"$work/nacelle.log" 2>&1 &
    until [ -S "$work/nacelle.sock" ]; do sleep 0.1; done
    for image in "$@"; do "$NACELLE_BIN" image load --config "$work/config.toml" "$image"; done
    ip link add node0 type bridge
    ip addr add 192.0.2.10/24 dev node0
    ip link set node0 up
    ip route add default dev node0
    while :; do
        if [ -e /var/lib/kubelet/config.yaml ]; then
            kubelet --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf \
                --config=/var/lib/kubelet/config.yaml --hostname-override=node --node-ip=192.0.2.10 || true
        fi
        sleep 0.5
    done >"$work/kubelet.log" 2>&1 &
    keeper=$!
}

# What `kubeadm reset` has systemd do.
stop_kubelet() {
    local children
    children=$(pgrep -P "$keeper")
    # Some words.
    kill "$keeper" $children
    wait "$keeper" || true
}

# What the whole nodes of ci/kubelet have in common (sourced): in a test node whose first process is systemd, Nacelle from its package.
set -euo pipefail
endpoint=unix:///run/nacelle/nacelle.sock
export HOME=/root
bin=/usr/local/bin
. "$(dirname "$0")/steps.sh"
units="nacelle kubelet"
places="/run/netns /run/nacelle/pods /var/lib/nacelle/cni"
kubelet_here=
log_of() { journalctl --no-pager -o cat -u "$1"; }
groups_of_pods() { find /sys/fs/cgroup -type d -name 'nacelle-*' | wc -l; }
leases() { find /var/lib/cni/leases -name '10.88.*' | wc -l; }

# The network of the node's pods.
write_network() {
    mkdir -p /etc/cni/net.d
    cat >/etc/cni/net.d/10-node.conflist <<'END'
{"cniVersion": "1.0.0", "name": "node", "plugins": [{"type": "bridge", "bridge": "cni0", "isGateway": true, "ipam":
 {"type": "host-local", "dataDir": "/var/lib/cni/leases", "ranges": [[{"subnet": "10.88.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
END
}

# nacelle_from PACKAGE IMAGE...: as docs/operator/kubernetes.md has it, with these images.
nacelle_from() {
    local package=$1 image
    shift
    write_network
    dpkg -i "$package"
    sed -i 's/^#cgroup_driver = .*/cgroup_driver = "systemd"/; s/^#host_namespaces = .*/host_namespaces = "run-on-host"/' \
        /etc/nacelle/config.toml
    cp /usr/share/doc/nacelle/examples/crictl.yaml /etc/
    systemctl restart nacelle
    for image in "$@"; do nacelle image load "$image"; done
}

# The node's address, on an interface of its own, from every start on; before these units.
address() {
    cat >/etc/systemd/system/address.service <<END
[Unit]
Before=$*
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'ip link add node0 type bridge; ip addr add 192.0.2.10/24 dev node0; ip link set node0 up; ip route add default dev node0'
RemainAfterExit=yes
[Install]
WantedBy=multi-user.target
END
}

#!/bin/sh
# The program of the installer's containers (docs/examples/installer), on each node of a DaemonSet:
#   installer.sh install     installs the tarball in this image on the node, labels the node, and waits for the end
#   installer.sh uninstall   removes labels, units and programs, and waits for the end
# Installing does not change which runtime kubelet uses. While that is Nacelle, the node has the label nacelle.dev/runtime=true, which
# RuntimeClasses select, and is not uninstalled.
#   NODE_NAME          the node's name in the cluster
#   NACELLE_PREFIX     where Nacelle goes on the node (/opt/nacelle)
#   NACELLE_PURGE=yes  uninstall removes images, disks and the configuration, too
#   NACELLE_INTERVAL   seconds between two looks at the node's runtime (60)
#   NACELLE_ROOT       the node's root in the container (/host)
#   NACELLE_CONTENTS   the tarball's contents in the container (/nacelle)
# Needs kubectl with the right to get and patch nodes, and nsenter in the node's PID namespace (hostPID, privileged).
set -eu
root=${NACELLE_ROOT:-/host} prefix=${NACELLE_PREFIX:-/opt/nacelle} contents=${NACELLE_CONTENTS:-/nacelle}
die() { echo "installer: $*" >&2; exit 1; }
: "${NODE_NAME:?the name of the node is needed}"

on_node() { nsenter -t 1 -m -u -i -n -p -- "$@"; }
has_systemd() { [ -d "$root/run/systemd/system" ]; }
label() { kubectl label --overwrite node "$NODE_NAME" "$@"; }
uses_nacelle() {
    case $(kubectl get node "$NODE_NAME" -o 'jsonpath={.status.nodeInfo.containerRuntimeVersion}') in
    nacelle://*) return 0 ;;
    *) return 1 ;;
    esac
}
# pause SECONDS: ends at once at the end of the container.
trap 'exit 0' TERM INT
pause() { sleep "$1" & wait $!; }

install_node() {
    new=$(cat "$contents/VERSION")
    # The daemon needs no restart if these are the files that it was started with: the version that this program started last, which is
    # unknown from the installation to the end of the restart, and that of the files, which another program may have replaced.
    started=$root$prefix/share/nacelle/started
    old="$(cat "$started" 2>/dev/null || true), $(cat "$root$prefix/VERSION" 2>/dev/null || true)"
    rm -f "$started"
    "$contents/install.sh" --root "$root" --prefix "$prefix"
    if has_systemd; then
        on_node systemctl daemon-reload
        on_node systemctl enable --quiet nacelle.socket nacelle.service
        on_node systemctl start nacelle.socket
        # A new program, or none that runs; pods keep running.
        if [ "$new, $new" = "$old" ]; then on_node systemctl start nacelle.service; else on_node systemctl restart nacelle.service; fi
        echo "$new" >"$started"
    fi
    label "nacelle.dev/installed=${new%% *}"
    last=
    while :; do
        if uses_nacelle; then now=nacelle.dev/runtime=true; else now=nacelle.dev/runtime-; fi
        if [ "$now" != "$last" ]; then
            label "$now"
            last=$now
        fi
        pause "${NACELLE_INTERVAL:-60}"
    done
}

uninstall_node() {
    ! uses_nacelle || die "kubelet of node $NODE_NAME uses Nacelle: drain the node and give kubelet another runtime first"
    if has_systemd; then
        on_node systemctl disable --quiet --now nacelle.service nacelle.socket || true
    fi
    set -- --uninstall
    [ "${NACELLE_PURGE:-no}" != yes ] || set -- "$@" --purge
    "$contents/install.sh" "$@" --root "$root" --prefix "$prefix"
    ! has_systemd || on_node systemctl daemon-reload
    label nacelle.dev/runtime- nacelle.dev/installed-
    while :; do pause "${NACELLE_INTERVAL:-60}"; done
}

case ${1:-} in
install) install_node ;;
uninstall) uninstall_node ;;
*) die "\"${1:-}\" is neither install nor uninstall" ;;
esac

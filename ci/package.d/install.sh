#!/bin/sh
# Installs Nacelle from this directory, the contents of its tarball; as root:
#   ./install.sh [--prefix DIR] [--root DIR] [--no-start]
#   ./install.sh --uninstall [--purge] [--prefix DIR] [--root DIR] [--no-start]
# Programs, the guest's kernel, documents, completions and man pages go below the prefix; units to /etc/systemd/system;
# /etc/nacelle/config.toml is written if it is missing. Nothing is written to /usr, unless the prefix is there. Where systemd runs, the
# units are enabled and the daemon is started, or started anew: pods keep running.
#   --prefix DIR   the place on the node (/opt/nacelle)
#   --root DIR     the node's root, seen from here (/): of an image, or of the node in a container; implies --no-start
#   --no-start     leaves systemd alone
#   --uninstall    removes what was installed and, if no pods are left, the saved VMs of templates; images, pods' disks and the
#                  configuration stay, and pods keep running
#   --purge        removes them too, unless pods are left
# Needs a POSIX shell and the usual tools (busybox has them).
set -eu
prefix=/opt/nacelle
root='' start=yes action=install purge=no
here=$(cd "$(dirname "$0")" && pwd)

usage() { sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }
die() { echo "install.sh: $*" >&2; exit 1; }
while [ $# -gt 0 ]; do
    case $1 in
    --prefix | --root)
        [ $# -gt 1 ] || usage
        case $1 in --prefix) prefix=$2 ;; --root) root=$2 start=no ;; esac
        shift
        ;;
    --no-start) start=no ;;
    --uninstall) action=uninstall ;;
    --purge) purge=yes ;;
    *) usage ;;
    esac
    shift
done
[ $purge = no ] || [ $action = uninstall ] || usage
# The prefix goes into units and the configuration as it is.
case $prefix in
/ | *[!A-Za-z0-9/._-]* | *//* | */ | */./* | */../* | */. | */..) die "the prefix \"$prefix\" is invalid: a path like /opt/nacelle of letters, digits and ._- is needed" ;;
/*) ;;
*) die "the prefix \"$prefix\" is not absolute" ;;
esac
case $root in
'' | /) root='' ;;
*) [ -d "$root" ] || die "the root \"$root\" is no directory" ;;
esac
target=$root$prefix
units=$root/etc/systemd/system
config=$root/etc/nacelle/config.toml
# The paths of all files below the prefix that belong to it.
list=$target/share/nacelle/files
has_systemd() { [ $start = yes ] && [ -d /run/systemd/system ] && command -v systemctl >/dev/null; }

# put FILE TARGET MODE: files in one step, so that a program that runs is replaced and never overwritten.
put() {
    mkdir -p "$(dirname "$2")"
    # mv would follow a link to a directory that is there already.
    if [ -L "$1" ]; then
        rm -f "$2"
        cp -P "$1" "$2"
        return
    fi
    rm -f "$2.new"
    cp "$1" "$2.new"
    chmod "$3" "$2.new"
    mv -f "$2.new" "$2"
}

# fill TEMPLATE TARGET: with the prefix.
fill() {
    mkdir -p "$(dirname "$2")"
    sed "s|@PREFIX@|$prefix|g" "$here/templates/$1" >"$2.new"
    chmod 644 "$2.new"
    mv -f "$2.new" "$2"
}

# remove_listed LIST KEEP: removes the files below the prefix that LIST names and KEEP does not, and directories that are then empty.
remove_listed() {
    while read -r path; do
        case $path in '' | /* | ../* | */../*) continue ;; esac
        ! grep -Fqx -- "$path" "$2" || continue
        rm -f "$target/$path"
        directory=$(dirname "$path")
        while [ "$directory" != . ] && rmdir "$target/$directory" 2>/dev/null; do directory=$(dirname "$directory"); done
    done <"$1"
}

install_all() {
    [ -x "$here/bin/nacelle" ] && [ -d "$here/templates" ] || die "$here does not contain the files of the tarball"
    umask 022
    mkdir -p "$target/share/nacelle" "$root/etc/nacelle"
    new=$list.new
    (cd "$here" && find bin lib share \( -type f -o -type l \) | grep -vx 'share/nacelle/files.*' | sort) >"$new"
    printf '%s\n' install.sh VERSION templates/config.toml templates/nacelle.service templates/nacelle.socket >>"$new"
    # From the prefix itself there is nothing to copy.
    if [ "$here" != "$target" ]; then
        while read -r path; do
            case $path in bin/* | install.sh) mode=755 ;; *) mode=644 ;; esac
            put "$here/$path" "$target/$path" $mode
        done <"$new"
        # What an older version had.
        [ ! -f "$list" ] || remove_listed "$list" "$new"
        sed "s|@PREFIX@|$prefix|g" "$here/share/doc/nacelle/examples/crictl.yaml" >"$target/share/doc/nacelle/examples/crictl.yaml"
    fi
    mv -f "$new" "$list"
    fill nacelle.service "$units/nacelle.service"
    fill nacelle.socket "$units/nacelle.socket"
    if [ -e "$config" ]; then
        echo "kept $config; its kernel and initrd are to be those of $prefix/lib/nacelle" >&2
    else
        fill config.toml "$config"
    fi
    if has_systemd; then
        systemctl daemon-reload
        systemctl enable --quiet nacelle.socket nacelle.service
        systemctl start nacelle.socket
        systemctl restart nacelle.service
    fi
    echo "installed $(cat "$here/VERSION") below $prefix; the node's abilities: $prefix/bin/nacelle check" >&2
}

# Releases what Nacelle holds without a daemon and without pods: the memory of templates, which is a file system of its own, cgroups, and the
# lock for network namespaces.
release_node() {
    templates=$root/run/nacelle/templates
    # In a container this is a copy of the node's mount, which ends with its directory. A program may still use it.
    umount "$templates" 2>/dev/null || umount -l "$templates" 2>/dev/null || true
    rm -f "$root/run/.netns.nacelle-lock"
    rm -rf "$templates" || echo "$templates is not removed" >&2
    # With cgroup v1 in each hierarchy.
    cgroups=$root/sys/fs/cgroup
    if [ -e "$cgroups/cgroup.controllers" ]; then set -- "$cgroups"; else set -- "$cgroups"/*; fi
    for hierarchy; do
        # The process that builds a template ends soon after the daemon.
        for _ in 1 2 3 4 5; do
            if ! [ -d "$hierarchy/nacelle/templates" ] || rmdir "$hierarchy/nacelle/templates" 2>/dev/null; then break; fi
            sleep 1
        done
        rmdir "$hierarchy/nacelle" 2>/dev/null || true
    done
}

uninstall_all() {
    if has_systemd; then
        systemctl disable --quiet --now nacelle.service nacelle.socket 2>/dev/null || true
    fi
    rm -f "$units/nacelle.service" "$units/nacelle.socket"
    for link in multi-user.target.wants/nacelle.service sockets.target.wants/nacelle.socket; do rm -f "$units/$link"; done
    if has_systemd; then systemctl daemon-reload; fi
    if [ -f "$list" ]; then
        # This script may be one of the files.
        copy=$(mktemp)
        cp "$list" "$copy"
        # The last is of the installer's container.
        rm -f "$list" "$target/share/nacelle/started"
        remove_listed "$copy" /dev/null
        rm -f "$copy"
        rmdir "$target/share/nacelle" "$target/share" "$target" 2>/dev/null || true
    fi
    if [ -z "$(ls "$root/run/nacelle/pods" 2>/dev/null)" ]; then
        release_node
        if [ $purge = yes ]; then
            rm -rf "$root/var/lib/nacelle" "$root/run/nacelle" "$config"
            rmdir "$root/etc/nacelle" 2>/dev/null || true
        fi
    elif [ $purge = yes ]; then
        echo "pods are left, so /var/lib/nacelle, /run/nacelle and $config are not removed" >&2
    fi
    echo "removed Nacelle from $prefix" >&2
}

case $action in
install) install_all ;;
uninstall) uninstall_all ;;
esac

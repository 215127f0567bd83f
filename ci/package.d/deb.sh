# The Debian package (sourced by ci/package, bash).

# pack_deb PROGRAMS WORK PACKAGE: packs the programs of a directory.
pack_deb() {
    local programs=$1 work=$2 package=$3 tree=$2/deb libraries
    local doc=$tree/usr/share/doc/nacelle
    install_programs "$programs" "$tree/usr/bin"
    install_guest "$tree/usr/bin/nacelle-agent" "$tree/usr/lib/nacelle"
    install -D -m 644 -t "$tree/etc/nacelle" "$pieces/config.toml"
    install -D -m 644 -t "$tree/lib/systemd/system" "$pieces/nacelle.service" "$pieces/nacelle.socket"
    install_generated "$tree/usr/bin/nacelle" "$tree/usr/share"
    install -D -m 644 "$pieces/lintian-overrides" "$tree/usr/share/lintian/overrides/nacelle"
    install_documents "$doc"
    {
        printf 'nacelle (%s) unstable; urgency=medium\n\n  * Commit %s; CHANGELOG.md of the sources lists what is new.\n\n' \
            "$version" "$NACELLE_COMMIT"
        printf ' -- Nacelle <maintainers@nacelle.dev>  %s\n' "$(date -R -d "@$SOURCE_DATE_EPOCH")"
    } | gzip -9n >"$doc/changelog.gz"
    gzip -9nc CHANGELOG.md >"$doc/NEWS.gz"

    # What the programs that are not static need of the C library.
    mkdir "$work/debian"
    printf 'Source: nacelle\n\nPackage: nacelle\nArchitecture: amd64\n' >"$work/debian/control"
    libraries=$(cd "$work" && dpkg-shlibdeps -O "-e$tree/usr/bin/nacelle" "-e$tree/usr/bin/nacelle-keeper" "-e$tree/usr/bin/nacelle-unpack" \
        2>/dev/null | sed -n 's/^shlibs:Depends=//p')
    [ -n "$libraries" ] || die "dpkg-shlibdeps finds no libraries"
    mkdir "$tree/DEBIAN"
    cat >"$tree/DEBIAN/control" <<END
Package: nacelle
Version: $version
Architecture: amd64
Maintainer: Nacelle <maintainers@nacelle.dev>
Installed-Size: $(find "$tree" -type f ! -path '*/DEBIAN/*' -printf '%s\n' | awk '{kib += int(($1 + 1023) / 1024)} END {print kib}')
Depends: $libraries, e2fsprogs, init-system-helpers (>= 1.54~)
Recommends: apparmor, containernetworking-plugins, dbus, qemu-system-x86 (>= 1:7.2)
Suggests: ovmf
Section: admin
Priority: optional
Description: Kubernetes container runtime in which every pod is a virtual machine
 kubelet, or crictl, speaks CRI to one daemon. For each pod it starts a small
 process that boots a machine with a minimal Linux kernel of its own, and an
 agent inside runs the pod's containers: ordinary OCI images, CNI networking,
 CRI logs.
 .
 Where KVM runs guests on hardware, pods live in Nacelle's own virtual machine
 monitor; elsewhere QEMU emulates. "nacelle check" says which it is.
END
    echo /etc/nacelle/config.toml >"$tree/DEBIAN/conffiles"
    install -m 755 "$pieces/postinst" "$pieces/prerm" "$pieces/postrm" "$tree/DEBIAN"
    (cd "$tree" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
    set_times "$tree"
    mkdir -p "${package%/*}"
    # One thread: with more, the bytes depend on the number of processors.
    dpkg-deb --root-owner-group --threads-max=1 -Zxz --build "$tree" "$package" >&2
    add_checksum "$package"
}

# The tarball, which installs below a prefix (sourced by ci/package, bash).

# pack_tarball PROGRAMS WORK TARBALL PREFIX: packs the programs of a directory. PREFIX is what its install.sh uses by default.
pack_tarball() {
    local programs=$1 tarball=$3 prefix=$4 name tree unit
    name=${tarball##*/} name=${name%.tar.xz}
    tree=$2/$name
    install_programs "$programs" "$tree/bin"
    install_guest "$tree/bin/nacelle-agent" "$tree/lib/nacelle"
    install_generated "$tree/bin/nacelle" "$tree/share"
    install_documents "$tree/share/doc/nacelle"
    # install.sh puts the prefix in the place of @PREFIX@.
    mkdir -p "$tree/templates"
    for unit in nacelle.service nacelle.socket; do
        sed 's|/usr/|@PREFIX@/|g' "$pieces/$unit" >"$tree/templates/$unit"
    done
    sed -e 's|/usr/share/doc/|@PREFIX@/share/doc/|g' -e 's|^#\(kernel = "\)/usr/|\1@PREFIX@/|' -e 's|^#\(initrd = "\)/usr/|\1@PREFIX@/|' \
        "$pieces/config.toml" >"$tree/templates/config.toml"
    sed -i 's|/usr/share/doc/|@PREFIX@/share/doc/|' "$tree/share/doc/nacelle/examples/crictl.yaml"
    sed "s|^prefix=.*|prefix=$prefix|" "$pieces/install.sh" >"$tree/install.sh"
    echo "$version $NACELLE_COMMIT" >"$tree/VERSION"
    find "$tree" -type d -exec chmod 755 {} +
    find "$tree" -type f ! -path "$tree/bin/*" -exec chmod 644 {} +
    chmod 755 "$tree/install.sh"
    set_times "$tree"
    mkdir -p "${tarball%/*}"
    # Names in order, no owners, no threads of xz.
    tar -C "$2" --format=gnu --sort=name --owner=0 --group=0 --numeric-owner "--mtime=@$SOURCE_DATE_EPOCH" -cf - "$name" | xz -T1 >"$tarball"
    add_checksum "$tarball"
}

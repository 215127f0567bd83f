# What the Debian package and the tarball have in common (sourced by ci/package, bash). Uses `pieces`, `repo`, `cargo`, `version`,
# SOURCE_DATE_EPOCH and NACELLE_COMMIT, and runs in the repository.

# install_programs FROM TO: the five programs, without symbols.
install_programs() {
    local program
    for program in nacelle nacelle-pod nacelle-keeper nacelle-unpack nacelle-agent; do
        install -D -m 755 -t "$2" "$1/$program"
        strip --strip-all --remove-section=.comment --remove-section=.note "$2/$program"
    done
}

# install_guest AGENT TO: the guest's kernel, from the cache, and the initramfs with that agent.
install_guest() {
    local kernel initrd
    kernel=$("$repo/guest/build" kernel) || die "the guest kernel does not build"
    initrd=$("$repo/guest/build" initramfs "$1") || die "the initramfs cannot be packed"
    install -D -m 644 "$kernel" "$2/vmlinux"
    install -D -m 644 "$initrd" "$2/initrd"
}

# install_generated NACELLE SHARE: completions of shells, and a man page for each command.
install_generated() {
    completion() {
        mkdir -p "$2/${3%/*}"
        "$1" completion "$4" >"$2/$3" || die "nacelle prints no completion for $4"
    }
    completion "$1" "$2" bash-completion/completions/nacelle bash
    completion "$1" "$2" zsh/vendor-completions/_nacelle zsh
    completion "$1" "$2" fish/vendor_completions.d/nacelle.fish fish
    mkdir -p "$2/man/man1"
    "$1" man "$2/man/man1" || die "nacelle writes no man pages"
    gzip -9n "$2"/man/man1/*.1
}

# install_documents DOC: the documents keep their layout, so that links between them work; the manifests lie in DOC/examples and are
# linked there. And the licences, and the bill of materials.
install_documents() {
    local doc=$1
    install -D -m 644 -t "$doc" README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md ROADMAP.md
    install -D -m 644 -t "$doc/guest" guest/README.md
    (cd docs && find . \( -name '*.md' -o -path './plots/*.svg' \) -print0 | sort -z | xargs -0 -I{} install -D -m 644 {} "$doc/docs/{}")
    install -D -m 644 -t "$doc/examples" "$pieces/crictl.yaml"
    (cd docs/examples && find . -type f -print0 | sort -z | xargs -0 -I{} install -D -m 644 {} "$doc/examples/{}")
    ln -s ../examples "$doc/docs/examples"
    sed "s/@KERNEL@/$(sed -n 's/^\(linux-source-[^ ]* [^ ]*\).*/\1/p' guest/versions.lock)/" "$pieces/copyright" >"$doc/copyright"
    "$cargo" xtask sbom >"$doc/sbom.cdx.json" || die "the bill of materials cannot be written"
    jq -r '.components[] | "\(.name) \(.version): \(.licenses[0].expression // "see its sources")"' "$doc/sbom.cdx.json" >"$doc/libraries.txt"
}

# set_times TREE: all times are the commit's.
set_times() { find "$1" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +; }

# add_checksum FILE: FILE.sha256, for `sha256sum --check` in its directory.
add_checksum() { (cd "${1%/*}" && sha256sum "${1##*/}" >"${1##*/}.sha256"); }

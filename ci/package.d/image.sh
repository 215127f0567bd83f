# The installer's image (sourced by ci/package, bash).

# pack_image TARBALL WORK IMAGE: an OCI archive with busybox, kubectl, installer.sh and the contents of the tarball.
pack_image() {
    local tree=$2/image
    mkdir -p "$tree/nacelle" "$tree/bin" "${3%/*}"
    tar -C "$tree/nacelle" --no-same-owner --strip-components=1 -xf "$1"
    kubernetes_program kubectl
    install -m 755 "$cache/tools/kubectl-$kubernetes_version" "$tree/bin/kubectl"
    install -m 755 "$pieces/installer.sh" "$tree/installer.sh"
    find "$tree" -type d -exec chmod 755 {} +
    "$repo/ci/oci-image" --ref "nacelle-installer:$version" --entrypoint /installer.sh --cmd install --tree "$tree" "$3"
    add_checksum "$3"
}

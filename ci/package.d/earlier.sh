# The Debian package of another commit (sourced by ci/package, bash).

# earlier_package REVISION: builds it with the scripts of that commit, and prints its path. It stays in the cache.
earlier_package() {
    local revision tree target built directory
    revision=$(git rev-parse --verify --quiet "$1^{commit}") || die "there is no commit $1"
    directory=$cache/versions/$revision-package
    if ! compgen -G "$directory/*.deb" >/dev/null; then
        tree=$cache/versions/tree target=$cache/versions/target
        git worktree remove --force "$tree" 2>/dev/null || rm -rf "$tree"
        git worktree prune
        git worktree add --force --detach "$tree" "$revision" >&2 || die "cannot check out $revision"
        # Its variables are those of that commit.
        built=$(env -C "$tree" -u SOURCE_DATE_EPOCH -u NACELLE_COMMIT CARGO_TARGET_DIR="$target" ci/package | tail -n 1) ||
            die "the package of $revision cannot be built"
        rm -rf "$directory.new"
        mkdir -p "$directory.new"
        cp "$built" "$directory.new/"
        rm -rf "$directory"
        mv "$directory.new" "$directory"
        git worktree remove --force "$tree" >&2
    fi
    compgen -G "$directory/*.deb"
}

# Programs of the node in the file system of an image (sourced).

# add_program TREE FILE [PATH]: copies a program of the node, and its shared libraries, to PATH (default: where it is on the node).
add_program() {
    local tree=$1 file=$2 library
    install -D "$(realpath "$file")" "$tree${3:-$file}"
    for library in $(ldd "$file" 2>/dev/null | grep -o '/[^ ]*' || true); do
        [ -e "$tree$library" ] || install -D "$(realpath "$library")" "$tree$library"
    done
}

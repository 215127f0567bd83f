# The steps, checks and waits of a test of a whole node (sourced). The test sets `units`, whose logs are printed on failure, and
# defines `log_of UNIT`.
step() { echo "== $(date +%T) $*"; }
fail() {
    echo "error: $*"
    kubectl get pods -A -o wide || true
    crictl pods || true
    crictl ps -a || true
    kubectl get events -A --sort-by=.lastTimestamp | tail -n 20 || true
    for unit in $units; do
        echo "--- $unit"
        log_of "$unit" | cut -c1-300 | tail -n 25
    done
    if [ -e /var/lib/before ]; then
        echo "--- before the power cut"
        cat /var/lib/before
    fi
    exit 1
}
is() { [ "$2" = "$3" ] || fail "$1: \"$2\", not \"$3\""; }
# eventually WHAT COMMAND...
eventually() {
    local what=$1 end=$((SECONDS + ${patience:-420}))
    shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || fail "waited in vain: $what"
        sleep 2
    done
    echo "   $(date +%T) $what"
}

# shellcheck shell=bash
# Stages of a check: one after the other, or in lists beside each other. For scripts with "set -euo pipefail".
# The first stage that fails ends the script with its exit code, and also what runs beside it.

logs=$(mktemp -d)
lists=()   # process groups of the lists that run
in_list='' # not empty in a list

# stage NAME COMMAND...: In a list, the command is a program, and what it prints is shown when it has ended.
stage() {
    local name=$1 code=0
    shift
    if [ -z "$in_list" ]; then
        printf '\n=== %s\n' "$name"
        timed "$name" "$@"
        return
    fi
    locked printf '=== %s: begins\n' "$name"
    # Under nohup, or in the background of a script, SIGINT would be ignored, which stop() sends.
    timed "$name" env --default-signal=INT "$@" >"$logs/$name" 2>&1 || code=$?
    locked show "$name" "$code"
    return "$code"
}

timed() {
    local TIMEFORMAT="=== $1: done in %0R s, with %0U s of processor time and %0S s of the system's"
    time "${@:2}"
}

# So that nothing is printed between the lines of another stage.
locked() (
    flock 9
    "$@"
) 9>"$logs/.lock"

# All that a stage has printed; nothing after that of one that has failed.
show() {
    if [ -e "$logs/failed" ]; then return; fi
    printf '\n=== %s\n' "$1"
    cat "$logs/$1"
    if [ "$2" != 0 ]; then
        printf '=== %s: failed with exit code %d\n' "$1" "$2"
        touch "$logs/failed"
    fi
}

# together FUNCTION...: Runs lists of stages beside each other; a list is a function.
together() {
    local list
    set -m # Each is a process group, and does not ignore SIGINT.
    for list in "$@"; do
        in_list=yes "$list" </dev/null &
        lists+=($!)
    done
    set +m
    # "wait -n" does not know a list that ended before it was called.
    while [ ${#lists[@]} != 0 ]; do
        sleep 0.1
        for list in "${!lists[@]}"; do
            if kill -0 "${lists[list]}" 2>/dev/null; then continue; fi
            wait "${lists[list]}"
            unset "lists[list]"
        done
    done
}

# As Ctrl-C does: tests and demos then end what they have started.
stop() {
    local list
    touch "$logs/failed"
    for list in "${lists[@]}"; do
        kill -INT -- "-$list" 2>/dev/null || continue
        timeout 60 tail --pid="$list" --sleep-interval=0.1 -f /dev/null || true
        kill -KILL -- "-$list" 2>/dev/null || true
    done
    rm -r "$logs"
}
trap stop EXIT

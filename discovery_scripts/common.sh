# Sourced by the scripts beside it, which set $self to their own path; not a program.
# shellcheck shell=sh
#
# poll SOURCE [--name=VALUE ...] -- WORDS: print the hosts of SOURCE; the flags before -- come from variables.

root=${self:?}
root=${root%/*/*}

case ${1-} in
--help | -h)
    # The header of a script is its manual: every line from the second to the first that is no comment.
    sed -n -e '1d' -e '/^#/!q' -e 's/^# \{0,1\}//p' "$self"
    exit 0
    ;;
esac

poll() {
    python=${EDL_HVD_PYTHON-}
    if [ -z "$python" ]; then
        python=$root/.venv/bin/python
        [ -x "$python" ] || python=python3
    fi
    # -I -S: no site-packages and no PYTHON* variables, so that a poll costs a third and nothing shadows anything.
    exec "$python" -I -S "$root/edl_hvd/discovery/polling/poll.py" "${EDL_HVD_DISCOVERY_CACHE:-${TMPDIR:-/tmp}}" "$@"
}

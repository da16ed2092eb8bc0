# Sourced by the scripts beside it, which set $self to their own path; not a program.
# shellcheck shell=sh
#
# poll SOURCE WORDS: print the hosts of SOURCE.

# In a checkout the folder of this file lies beside the package; installed, within it.
root=${self:?}
root=${root%/*/*}
package=$root/edl_hvd
prefix=$root/.venv
if [ ! -d "$package" ]; then
    package=$root
    prefix=${root%/lib/python*}
fi

case ${1-} in
--help | -h)
    # The header of a script is its manual: every line from the second to the first that is no comment. The line of
    # the flags' variables becomes one for each flag that its usage describes.
    awk '
        NR == 1 { next }
        !/^#/ { exit }
        { sub(/^# ?/, "") }
        /^  (--[a-z]|[A-Z][A-Z]+(  |, --))/ { shown[++flags] = $1; name[flags] = index($1, ",") ? $2 : $1 }
        index($0, "EDL_HVD_DISCOVERY_...") {
            column = match($0, /\.\.\. +/) + RLENGTH - 3
            split($0, part, ", e.g. ")  # before it stand those that have another variable
            for (i = 1; i <= flags; i++) {
                if (index(part[1], shown[i])) continue
                sub(/,$/, "", shown[i])
                sub(/^--/, "", name[i])
                gsub(/-/, "_", name[i])
                printf "  %-" column "s%s\n", "EDL_HVD_DISCOVERY_" toupper(name[i]), shown[i]
            }
            next
        }
        { print }
    ' "$self"
    exit 0
    ;;
esac

poll() {
    python=${EDL_HVD_PYTHON-}
    if [ -z "$python" ]; then
        python=$prefix/bin/python
        [ -x "$python" ] || python=python3
    fi
    # -I -S: no site-packages and no PYTHON* variables, so that a poll costs a third and nothing shadows anything.
    exec "$python" -I -S "$package/discovery/polling/poll.py" "${EDL_HVD_DISCOVERY_CACHE:-${TMPDIR:-/tmp}}" "$@"
}

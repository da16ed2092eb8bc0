"""Starting a worker through ssh, and talking with what watches over it there.

On the other host a small shell script, the supervisor, runs the worker. It travels over ssh's standard input, together
with the variables: a command line can be read by everybody on either host. Afterwards the same input carries ``term``,
``kill`` and questions about the worker; when it ends, the driver or the connection is gone, and the worker is left to
notice that by itself.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edl_hvd.driver.workers.process import Exit
from edl_hvd.errors import UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What a shell can export; bash's exported functions (BASH_FUNC_name%%) are not variables.
_OF_ONE_HOST = re.compile(
    r"SSH_.*|DISPLAY|WAYLAND_DISPLAY|XAUTHORITY|XDG_(SESSION_.*|RUNTIME_DIR|SEAT|VTNR)|DBUS_SESSION_BUS_ADDRESS"
    r"|TERM|TERM_.*|TERMCAP|COLORTERM|COLUMNS|LINES|TMUX.*|STY|WINDOWID|LANG|LANGUAGE|LC_.*"
    r"|HOME|USER|LOGNAME|SHELL|MAIL|HOSTNAME|HOSTTYPE|PWD|OLDPWD|SHLVL|_"
    r"|.*_VISIBLE_DEVICES"
    r"|BASH.*|SHELLOPTS|E?UID|PPID|GROUPS|IFS|ENV|PS[0-4]|CDPATH|OPT(IND|ARG|ERR)|LINENO|RANDOM|SECONDS"
)
# A login's display, terminal, language and user; a host's devices; what a shell keeps for itself or lets nobody set.

_SUPERVISOR = r"""
exec 3<&0 4>&1 5>&2 0</dev/null 2>/dev/null
say() { printf '%s %s\n' "$token" "$*"; }

CDPATH= cd -- "$folder" || { say no-folder >&5; exit 126; }
sh=$(command -v sh)
setsid=$(command -v setsid) || { say no-setsid >&5; exit 126; }
say begins >&4
say begins >&5

# Passes output on. When the connection breaks, tee goes on with /dev/null alone, so the worker can still print.
relay() {
    exec "$sh" -c 'trap "" PIPE; echo "relay $$" >&6; exec tee /dev/null 6>&-'
}

# Becomes the worker, in a process group of its own; its number is that of the process.
worker() {
    export_variables
    command -v "$1" >/dev/null || { echo no-program >&6; exit 127; }
    case ${1##*/},$2 in
    python*,|python*,-*) ;;
    python*) [ -e "$2" ] || { echo no-script >&6; exit 127; } ;;
    esac
    exec "$setsid" "$sh" -c 'echo "worker $$" >&6; exec "$@" 6>&-' sh "$@"
}

# Not in the background: there a shell without job control would make it ignore SIGINT.
run() {
    {
        {
            (worker "$@") 2>&7 3<&- 4>&- 5>&- 7>&-
            echo "ended $?" >&6
        } | relay >&4 3<&- 4>&- 5>&- 7>&-
    } 7>&1 | relay >&5 3<&- 4>&- 5>&-
}

# Sets process to that one of the group, else to its leader, and state to the letter of proc(5).
look_up() {
    for process in "$2" "$1"; do
        state=
        read -r line <"/proc/$process/stat" || continue
        set -- "$1" "$2" ${line##*)}
        state=$3
        if [ "$5" = "$1" ]; then return; fi
    done
}

# Says where the worker stands, in its own output.
show_stack() {
    look_up "$1" "$2"
    [ -n "$state" ] || return
    (export_variables; exec py-spy dump --nonblocking --full-filenames --pid "$process" >&5) && return
    if [ "$3" = stack ]; then kill -s QUIT "$process"; fi
}

obey() {
    while read -r word value; do
        case $word in
        term) kill -s TERM -- "-$1" ;;
        kill) kill -s KILL -- "-$1" ;;
        state) look_up "$1" "$value"; say state "$state" >&5 ;;
        stack|spy) show_stack "$1" "$value" "$word" & ;;
        esac
    done
}

# Somebody may have inherited the output and keep it open. If it is nobody of the group, the network is merely slow.
cut() {
    sleep "$patience" || sleep 1
    kill -s 0 -- "-$1" || sleep 5
    kill "$2" "$3"
}

# Reads what the others say, until the last of them has ended.
control() {
    reader= worker= first= second= status= timer= trouble=
    while read -r what value; do
        case $what in
        worker)
            worker=$value
            obey "$worker" <&3 >/dev/null 3<&- 4>&- &
            reader=$! ;;
        relay) if [ -z "$first" ]; then first=$value; else second=$value; fi ;;
        no-*) trouble=$what ;;
        ended)
            status=$value
            if [ -n "$worker" ] && [ "$status" != 0 ]; then kill -s KILL -- "-$worker"; fi ;;
        esac
        if [ -n "$status" ] && [ -n "$second" ] && [ -z "$timer" ]; then
            cut "$worker" "$first" "$second" </dev/null >/dev/null 3<&- 4>&- 5>&- &
            timer=$!
        fi
    done
    kill $reader $timer
    if [ -n "$status" ]; then say "${trouble:-ended}" "$status" >&5; fi
    exit "${status:-255}"
}
"""
_LAST_LINE = b'run "$@" 6>&1 | control\n'
# What comes before it only defines: a script that breaks off on its way starts nothing.

_SSH_FAILED = 255
_TROUBLES = {
    "no-folder": "host {host} has no folder {folder!r} that can be entered; expected the same folder as here",
    "no-setsid": "host {host} has no program 'setsid', which is in the package util-linux",
    "no-program": "host {host} finds no program {program!r}",
    "no-script": "host {host} has no file {script!r}, looked for in folder {folder!r}",
}


@dataclass(frozen=True)
class Ssh:
    """How hosts are reached.

    Attributes:
        port: Of the ssh servers, or ``None`` for what the user's configuration says.
        identity_file: Private key, or ``None`` for what the user's configuration says.
    """

    port: int | None = None
    identity_file: str | None = None

    def command(self, host: str, remote_command: str) -> list[str]:
        """The words that run ``remote_command`` there."""
        words = ["ssh", "-T", "-x"]
        for option in _OPTIONS:
            words += ["-o", option]
        if self.port is not None:
            words += ["-p", str(self.port)]
        if self.identity_file is not None:
            words += ["-i", self.identity_file]
        return [*words, host, remote_command]

    def real_name(self, host: str) -> str:
        """What the user's ssh configuration calls the host; its own name if it says nothing. Blocks for a moment."""
        try:
            answer = subprocess.run(
                ["ssh", "-G", host], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5, check=False
            ).stdout
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return host
        return dict(entry.partition(" ")[::2] for entry in answer.splitlines()).get("hostname", host)


_OPTIONS = (
    "BatchMode=yes",
    # There is nobody to answer a question.
    "StrictHostKeyChecking=accept-new",
    # New hosts are what elasticity is about; a known host whose key has changed is refused all the same.
    "ControlPath=none",
    # A connection that several workers share would end all of them, and its owner outlives its worker.
    "ClearAllForwardings=yes",
    # Two workers cannot forward the same port.
    "RemoteCommand=none",
    # A command that the user's configuration has for logins by hand.
    "ConnectTimeout=10",
    # Covers three lost packets; without it, a host that is switched off takes two minutes.
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    # Fifteen seconds, for a worker that still starts. Of one that trains its own connection tells sooner.
)


def exportable(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that mean something on another host.

    >>> exportable({"PATH": "/usr/bin", "DISPLAY": ":0", "CUDA_VISIBLE_DEVICES": "0", "BASH_FUNC_f%%": "() { :; }"})
    {'PATH': '/usr/bin'}
    """
    return {
        name: value for name, value in environment.items() if _NAME.fullmatch(name) and not _OF_ONE_HOST.fullmatch(name)
    }


class Supervisor:
    """The supervisor of one worker, as seen from here.

    Args:
        host: Where it runs.
        words: The worker's command.
        folder: Where the command runs.
        variables: Its environment there, besides what a login has.
        patience_s: How long output is waited for when the worker has ended.
        output: Gets ``"stdout"`` or ``"stderr"`` and a line of the worker.
        way: What leads there, for messages.

    Raises:
        UsageError: A variable's name is not one that a shell can export.

    Attributes:
        begun: The supervisor has spoken: the connection stands.
        status: The worker's, as a shell has it; ``None`` until it has ended.
        on_word: Called after each word of the supervisor.
        on_state: Gets the letter of proc(5) when it answers what state the worker is in; empty for none.
    """

    def __init__(
        self,
        host: str,
        words: tuple[str, ...],
        folder: str,
        variables: Mapping[str, str],
        patience_s: float,
        output: Callable[[str, bytes], None],
        way: str = "ssh",
    ) -> None:
        self.begun = False
        self._way = way
        self.status: int | None = None
        self.on_word: Callable[[], None] = lambda: None
        self.on_state: Callable[[str], None] = lambda state: None
        self._host, self._words, self._folder, self._output = host, words, folder, output
        # Tells the supervisor's lines from the worker's, which does not know it.
        self._token = secrets.token_hex(16)
        self._trouble: str | None = None
        self._late = ""
        self._last: dict[str, str] = {}
        self._early: dict[str, deque[bytes] | None] = {"stdout": deque(maxlen=100), "stderr": deque(maxlen=100)}
        self.script = self._script(variables, patience_s)

    @property
    def command(self) -> str:
        """For ssh. Any login shell understands it, csh and fish too.

        The script is read byte by byte, because what follows it is for the supervisor; ``sh -s`` would read on.
        """
        return f"""exec sh -c 'eval "$(dd bs=1 count={len(self.script)} 2>/dev/null)"'"""

    def take(self, stream: str, line: bytes) -> None:
        """Sort a line that came through ssh: the worker's, the supervisor's, or from before either began.

        The greetings of ssh and the login shell are kept back; they matter only when no worker follows.
        """
        before, token, message = line.partition(self._token.encode())
        early = self._early[stream]
        if before and early is not None:
            early.append(before)
        elif before:
            self._output(stream, before)
        # Once the worker runs, ssh's own lines are known by the carriage return.
        if before.strip() and (early is not None or (stream == "stderr" and before.endswith(b"\r\n"))):
            self._last[stream] = before.decode(errors="replace").strip()
        if token and message.endswith(b"\n"):  # else the connection broke within the word
            self._hear(stream, message.decode().split())

    def give_up(self, start_timeout_s: float) -> None:
        """The host took too long to begin; ssh is about to be ended for it."""
        self._late = f" within {start_timeout_s:g} s (--start-timeout)"

    def exit(self, returncode: int) -> Exit:
        """How the worker ended, once ssh has ended with ``returncode`` and nothing more will come."""
        for stream, early in self._early.items():
            for line in early or ():
                self._output(stream, line)
            self._early[stream] = None
        if self._trouble is not None:
            program, script = (*self._words, "")[:2]
            problem = _TROUBLES[self._trouble].format(
                host=self._host, folder=self._folder, program=program, script=script
            )
            return Exit.of_child(returncode, problem)
        if self.status is not None:
            return Exit.of_shell(self.status)
        if self.begun and 0 <= returncode < _SSH_FAILED:
            return Exit.of_shell(returncode)
        return Exit.of_child(returncode, self._failure(returncode), certain=not self.begun)

    def _failure(self, returncode: int) -> str:
        last = self._last.get("stderr") or self._last.get("stdout")
        said = (self._late or f" ({Exit.of_child(returncode).text})") + (f": {last}" if last else "")
        if self.begun:
            return f"{self._way} lost the connection to host {self._host}{said}; the worker may still run"
        return f"{self._way} could not connect to host {self._host}{said}"

    def _hear(self, stream: str, message: list[str]) -> None:
        if message == ["begins"]:
            self.begun = True
            self._early[stream] = None
            self._last.pop(stream, None)
        elif message[0] == "ended":
            self.status = int(message[1])
        elif message[0] == "state":
            self.on_state("".join(message[1:]))
        else:
            self._trouble = message[0]
        self.on_word()

    def _script(self, variables: Mapping[str, str], patience_s: float) -> bytes:
        bad = sorted(name for name in variables if not _NAME.fullmatch(name))
        if bad:
            raise UsageError(
                f"variables {bad} cannot be exported on host {self._host}; expected letters, digits and '_'"
            )
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
        head = f"token={self._token}\nfolder={shlex.quote(self._folder)}\npatience={patience_s:g}\n"
        head += f"set -- {' '.join(map(shlex.quote, self._words))}\nexport_variables() {{\n:\n{exports}}}\n"
        return os.fsencode(head + _SUPERVISOR) + _LAST_LINE

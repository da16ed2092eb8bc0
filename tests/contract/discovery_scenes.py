"""Every discovery script with a source behind it that can be told how to behave."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from edl_hvd.discovery.polling.cached import CacheEntry

SCRIPTS = Path(__file__).parents[2] / "discovery_scripts"


class Scene(ABC):
    """One script, its arguments, and its source. Hosts are ``name:slots`` words."""

    script: str
    refresh_s: float

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cache = folder / "cache"
        self.cache.mkdir()
        self.environment = {
            "PATH": os.environ["PATH"],
            "EDL_HVD_PYTHON": sys.executable,
            "EDL_HVD_DISCOVERY_CACHE": str(self.cache),
            "EDL_HVD_DISCOVERY_STALE": "300",
        }

    @property
    @abstractmethod
    def words(self) -> list[str]:
        """Arguments of a normal call."""

    @property
    @abstractmethod
    def variables(self) -> dict[str, str]:
        """The same as environment variables."""

    @abstractmethod
    def show(self, count: int) -> list[str]:
        """The source has ``count`` hosts from now on; returns the lines expected of a poll, sorted."""

    @abstractmethod
    def hang(self) -> None:
        """The source takes questions and never answers."""

    @abstractmethod
    def recover(self) -> None:
        """End whatever ``hang`` or a doubt began."""

    @property
    @abstractmethod
    def doubts(self) -> dict[str, Callable[[], None]]:
        """Ways in which the source can be wrong, each with a name."""

    def path(self) -> str:
        return str(SCRIPTS / self.script)

    def poll(self, words: list[str] | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """One poll, as Horovod makes it: a real process. The limit only ends a test that would hang."""
        command = [self.path(), *(self.words if words is None else words)]
        return subprocess.run(
            command, env={**self.environment, **variables}, cwd=self.folder, capture_output=True, text=True, timeout=120
        )

    def start_poll(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.path(), *self.words],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def poll_until(
        self, accept: Callable[[subprocess.CompletedProcess[str]], bool]
    ) -> subprocess.CompletedProcess[str]:
        """Poll again and again, as Horovod does; the limit only ends a test that would hang."""
        for _ in range(1200):
            result = self.poll()
            if accept(result):
                return result
            time.sleep(0.05)
        raise AssertionError(f"never accepted; the last poll was {result}")

    def let_pass(self, duration_s: float) -> None:
        """Make what is kept older, as if polls had gone on; the process that asks is killed first."""
        self.kill_askers()
        for path in self.cache.glob("*/*.answer"):
            entry = CacheEntry(str(path.with_suffix("")))
            record = entry.read()
            since_question_s = min(duration_s, self.refresh_s)
            older = replace(
                record,
                began_s=record.began_s - duration_s,
                answered_s=record.answered_s - duration_s,
                asked_s=record.asked_s - since_question_s,
                failed_s=record.failed_s - since_question_s,
            )
            entry.write(older, self.refresh_s)

    def poll_until_asked_in_vain(self) -> None:
        """Poll until a question that is put from now on has got no answer."""
        now_s = time.monotonic()

        def has_failed(result: subprocess.CompletedProcess[str]) -> bool:
            records = [CacheEntry(str(path.with_suffix(""))).read() for path in self.cache.glob("*/*.answer")]
            return any(record.failed_s > now_s for record in records)

        self.poll_until(has_failed)

    def forget(self) -> None:
        """As if there had never been a poll."""
        self.kill_askers()
        for path in self.cache.glob("*/*"):
            path.unlink()

    def kill_askers(self) -> int:
        """SIGKILL every process that asks for this scene; returns how many there were."""
        killed = 0
        for path in self.cache.glob("*/*.lock"):
            with path.open("r+") as lock:
                while not _try_lock(lock.fileno()):
                    lock.seek(0)
                    if pid := lock.read().strip():
                        os.kill(int(pid), signal.SIGKILL)
                        killed += 1
                        fcntl.flock(lock, fcntl.LOCK_EX)  # given up when it is really gone
                        lock.truncate(0)  # the next one may hold the lock a while before it writes its own number
                        break
        return killed

    def close(self) -> None:
        self.kill_askers()


def in_order(hosts: Iterable[tuple[str, int]]) -> list[str]:
    """The lines of an answer: sorted by host."""
    return [f"{host}:{slots}" for host, slots in sorted(hosts)]


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _FileScene(Scene):
    refresh_s = 0.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = folder / "some hosts.txt"

    @property
    def words(self) -> list[str]:
        return [self.file.name]

    def write(self, text: str) -> None:
        self.recover()
        part = self.folder / "part"
        part.write_text(text)
        part.replace(self.file)

    def hang(self) -> None:
        os.mkfifo(self.folder / "pipe")
        (self.folder / "pipe").replace(self.file)

    def recover(self) -> None:
        if self.file.is_dir():
            self.file.rmdir()

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        return {
            "missing": lambda: self.file.unlink(missing_ok=True),
            "emptied": lambda: self.write(""),
            "malformed": lambda: self.write("one two three four\n"),
            "not text": lambda: _replace_bytes(self.file, b"\xff\xfe\x00"),
            "a folder": lambda: _replace_by_folder(self.file),
        }


def _replace_bytes(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _replace_by_folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


class HostsFileScene(_FileScene):
    script = "from_file"

    @property
    def variables(self) -> dict[str, str]:
        return {"EDL_HVD_DISCOVERY_FILE": self.file.name}

    def show(self, count: int) -> list[str]:
        self.write("# hosts\n" + "".join(f"node-{number} slots={number + 1}\n" for number in reversed(range(count))))
        return in_order((f"node-{number}", number + 1) for number in range(count))

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        return {
            **super().doubts,
            "half written": lambda: self.write("node-0 slots=1\nnode-1 slo"),
            "a host twice": lambda: self.write("node-0\nnode-0:2\n"),
            "three fields": lambda: self.write("a:b:c\n"),
        }


class ScheduleScene(_FileScene):
    script = "from_schedule"

    @property
    def variables(self) -> dict[str, str]:
        return {"EDL_HVD_DISCOVERY_PLAN": self.file.name}

    def show(self, count: int) -> list[str]:
        coming = "".join(f"0 add node-{number}:{number + 1}\n" for number in reversed(range(count)))
        self.write(f"0 add gone\n{coming}0 remove gone\n1h add late\n")
        return in_order((f"node-{number}", number + 1) for number in range(count))

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        return {
            **super().doubts,
            "half written": lambda: self.write("0 add node-0:1\n10 add nod"),
            "out of order": lambda: self.write("10 add node-0\n5 add node-1\n"),
            "removes a stranger": lambda: self.write("0 add node-0\n5 remove node-1\n"),
        }

"""Scenes of the discovery scripts for clusters, addresses and combinations; see ``discovery_scenes.py``."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from discovery_scenes import Scene, in_order
from kubernetes_server import KubernetesServer, ListServer, ToldServer, make_certificate, pod
from waiting import soon

WORKERS = 40
# More than any test of the suite shows.


class _WebScene(Scene):
    """A script that asks a server of ours."""

    refresh_s = 10.0
    server: ToldServer
    wrong: tuple[str, ...]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.environment["EDL_HVD_DISCOVERY_FIRST"] = "60"  # a busy machine takes its time
        self.token_file = folder / "token"
        self.write_token("first")

    def write_token(self, token: str) -> None:
        part = self.folder / "token.part"
        part.write_text(f"{token}\n")
        part.replace(self.token_file)

    def hang(self) -> None:
        self.server.behave("hang")

    def recover(self) -> None:
        self.server.behave("answer")
        self.write_token(self.server.token)

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        def behaviour(name: str) -> Callable[[], None]:
            return lambda: self.server.behave(name)

        return {
            **{name: behaviour(name) for name in ("refuse", *self.wrong)},
            "wrong credentials": lambda: self.write_token("another"),
            "no token": lambda: self.token_file.unlink(missing_ok=True),
        }

    def close(self) -> None:
        super().close()
        self.server.close()


class KubernetesScene(_WebScene):
    script = "from_kubernetes"
    wrong = ("truncated", "not json", "a web page", "nothing", "throttled", "not allowed", "second page fails")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.authority = folder / "ca.crt"
        make_certificate(folder / "server.pem", self.authority)
        self.server: KubernetesServer = KubernetesServer("training", folder / "server.pem")
        self.server.token = "first"

    @property
    def words(self) -> list[str]:
        return ["app=trainer", "--namespace", "training", "--server", self.server.url, "--token-file", "token",
                "--ca-file", "ca.crt", "--page-size", "5"]  # fmt: skip

    @property
    def variables(self) -> dict[str, str]:
        values = {"SELECTOR": "app=trainer", "NAMESPACE": "training", "SERVER": self.server.url, "TOKEN_FILE": "token",
                  "CA_FILE": "ca.crt"}  # fmt: skip
        return {f"EDL_HVD_DISCOVERY_{name}": value for name, value in values.items()}

    def show(self, count: int) -> list[str]:
        ready = [pod(f"worker-{number}", f"10.1.0.{number + 1}", gpus=1 + number % 4) for number in range(count)]
        others = [pod("other", "10.1.1.1", app="web"), pod("starting", "10.1.1.2", ready=False)]
        self.server.pods = [*ready, *others]
        return in_order((f"10.1.0.{number + 1}", 1 + number % 4) for number in range(count))


class UrlScene(_WebScene):
    script = "from_url"
    wrong = ("truncated", "not json", "a web page", "nothing", "half a text", "elsewhere", "throttled", "broken")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server: ListServer = ListServer()
        self.server.token = "first"

    @property
    def words(self) -> list[str]:
        return [f"{self.server.url}/job", "--token-file", "token"]

    @property
    def variables(self) -> dict[str, str]:
        return {"EDL_HVD_DISCOVERY_URL": f"{self.server.url}/job", "EDL_HVD_DISCOVERY_TOKEN_FILE": "token"}

    def show(self, count: int) -> list[str]:
        hosts = [(f"node-{number}", number + 1) for number in range(count)]
        listed = [{"host": host, "slots": slots, "kind": "p3.2xlarge"} for host, slots in reversed(hosts)]
        self.server.body = json.dumps({"hosts": listed}).encode()
        return in_order(hosts)


class LeasesScene(Scene):
    """Hosts that write their leases again and again, as ``edl-hvd lease`` does, but all in one thread."""

    script = "from_leases"
    refresh_s = 2.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.environment["EDL_HVD_DISCOVERY_FIRST"] = "60"
        self.place = folder / "all leases"
        self._holding, self._closing = threading.Lock(), threading.Event()
        self._held: list[Path] = []
        self._count = 0
        self._writer = threading.Thread(target=self._write_again_and_again, daemon=True)
        self._writer.start()

    @property
    def words(self) -> list[str]:
        return [self.place.name]

    @property
    def variables(self) -> dict[str, str]:
        return {"EDL_HVD_DISCOVERY_URL": self.place.name}

    def _write_again_and_again(self) -> None:
        while not self._closing.wait(0.1):
            with self._holding:
                self._write_all()

    def _write_all(self) -> None:
        self._count += 1
        for path in self._held:
            self._write(path, json.dumps({"holder": "a" * 16, "count": self._count}).encode())

    def _write(self, path: Path, content: bytes) -> None:
        part = self.folder / "part"
        part.write_bytes(content)
        part.replace(path)

    def show(self, count: int) -> list[str]:
        with self._holding:
            held = [self.place / f"node-{number}={number + 1}.lease" for number in range(count)]
            if not self.place.is_dir() or not count:
                self._remove()
                self.place.mkdir()
            for path in set(self.place.iterdir()) - set(held):
                path.unlink()
            self._held = held
            self._write_all()
        return in_order((f"node-{number}", number + 1) for number in range(count))

    def _remove(self) -> None:
        """All at once, as when a folder is mounted no more."""
        self._held = []
        gone = self.folder / "gone"
        if self.place.exists():
            self.place.rename(gone)
        if gone.is_dir():
            shutil.rmtree(gone)
        else:
            gone.unlink(missing_ok=True)

    def hang(self) -> None:
        with self._holding:
            self._held = []
            self.place.mkdir(exist_ok=True)
            # One that is not known: those that are known have been written since, and count without being read.
            os.mkfifo(self.place / "node-9=1.lease")

    def recover(self) -> None:
        """Every test goes on with ``show``."""

    def close(self) -> None:
        super().close()
        self._closing.set()
        soon(self._writer)

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        def removed() -> None:
            with self._holding:
                self._remove()

        def holds(name: str, content: bytes) -> Callable[[], None]:
            def write() -> None:
                self.show(7)
                with self._holding:
                    self._held = [path for path in self._held if path.name != name]
                    self._write(self.place / name, content)

            return write

        def is_a_file() -> None:
            with self._holding:
                self._remove()
                self.place.write_text("")

        return {
            "missing": removed,
            "a file": is_a_file,
            "another file": holds("notes.txt", b"{}"),
            "emptied": holds("node-0=1.lease", b""),
            "half written": holds("node-0=1.lease", b'{"holder": "aa'),
            "not text": holds("node-0=1.lease", b"\xff\xfe\x00"),
            "another object": holds("node-0=1.lease", b'{"count": 3}'),
        }


class MpiJobScene(Scene):
    """The files as kubelet mounts a ConfigMap: links to ``..data``, itself a link to a folder of the day."""

    script = "from_mpijob"
    refresh_s = 0.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.mount = folder / "mpi files"
        self.mount.mkdir()
        self._versions = 0
        for name in ("hostfile", "discover_hosts.sh"):
            (self.mount / name).symlink_to(f"..data/{name}")
        self.hostfile = "".join(f"{self._name(number)} slots={number + 1}\n" for number in range(WORKERS))

    def _name(self, number: int) -> str:
        return f"job-worker-{number}.job-worker.training.svc"

    @property
    def words(self) -> list[str]:
        return [self.mount.name]

    @property
    def variables(self) -> dict[str, str]:
        return {"EDL_HVD_DISCOVERY_FOLDER": self.mount.name}

    def write(self, script: str | bytes | None, hostfile: str | None = None) -> None:
        """Swap both files at once; ``None`` for the script: a pipe that nobody writes to."""
        self._versions += 1
        version = self.mount / f"..version_{self._versions}"
        version.mkdir()
        (version / "hostfile").write_text(self.hostfile if hostfile is None else hostfile)
        if script is None:
            os.mkfifo(version / "discover_hosts.sh")
        else:
            (version / "discover_hosts.sh").write_bytes(script.encode() if isinstance(script, str) else script)
        self.point_to(version.name)

    def point_to(self, version: str) -> None:
        (self.mount / "..data_tmp").symlink_to(version)
        (self.mount / "..data_tmp").replace(self.mount / "..data")

    def show(self, count: int) -> list[str]:
        self.write("#!/bin/sh\n" + "".join(f"echo {self._name(number)}\n" for number in range(count)))
        return in_order((self._name(number), number + 1) for number in range(count))

    def hang(self) -> None:
        self.write(None)

    def recover(self) -> None:
        """Every test goes on with ``show``."""

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        return {
            "missing": lambda: self.point_to("..version_gone"),
            "emptied": lambda: self.write(""),
            "half written": lambda: self.write("#!/bin/sh\necho job-wor"),
            "another program": lambda: self.write("#!/bin/sh\ncurl https://hosts.example.com\n"),
            "not text": lambda: self.write(b"#!/bin/sh\n\xff\xfe\n"),
            "a stranger": lambda: self.write("#!/bin/sh\necho somebody.else\n"),
            "a host twice": lambda: self.write(f"#!/bin/sh\necho {self._name(0)}\necho {self._name(0)}\n"),
            "no hostfile": lambda: self.write(f"#!/bin/sh\necho {self._name(0)}\n", hostfile=""),
        }


SCONTROL = """\
#!/bin/sh
# Answers from the files beside it.
folder=${0%/*}
[ -e "$folder/pipe" ] && exec cat "$folder/pipe"
[ -e "$folder/refusal" ] && { cat "$folder/refusal" >&2; exit 1; }
case "$*" in
"show hostnames node-["*"]") cat "$folder/names" ;;
"--oneliner show node node-["*"]") cat "$folder/nodes" ;;
*) echo "invalid entity: $*" >&2; exit 1 ;;
esac
"""


class SlurmScene(Scene):
    """With a ``scontrol`` on PATH that answers from files. Of the job's many nodes the first are in service."""

    script = "from_slurm"
    refresh_s = 10.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.commands = folder / "bin"
        self.commands.mkdir()
        (self.commands / "scontrol").write_text(SCONTROL)
        (self.commands / "scontrol").chmod(0o755)
        (self.commands / "names").write_text("".join(f"node-{number:02d}\n" for number in range(WORKERS)))
        self.environment["PATH"] = f"{self.commands}:{self.environment['PATH']}"
        self.environment["EDL_HVD_DISCOVERY_FIRST"] = "60"

    @property
    def words(self) -> list[str]:
        return ["node-[00-39]", "--slots", "4"]

    @property
    def variables(self) -> dict[str, str]:
        return {"EDL_HVD_DISCOVERY_NODELIST": "node-[00-39]", "EDL_HVD_DISCOVERY_SLOTS": "4"}

    def lines(self, count: int) -> str:
        """Of ``scontrol --oneliner show node``: the first nodes work, the others do not, each in its way."""
        states = ["DOWN*", "MIXED+DRAIN", "DRAINED", "FAILING*+NOT_RESPONDING", "IDLE+DRAIN+DYNAMIC_NORM"]
        return "".join(
            f"NodeName=node-{number:02d} Arch=x86_64 CoresPerSocket=16 Gres=gpu:a100:4 NodeAddr=node-{number:02d} "
            + ("State=ALLOCATED ThreadsPerCore=2 Comment=(null)\n" if number < count else
               f"State={states[number % 5]} ThreadsPerCore=2 Reason=fan failed [root@2026-01-31T12:00:00]\n")
            for number in range(WORKERS)
        )  # fmt: skip

    def write(self, name: str, text: str) -> None:
        part = self.folder / "part"
        part.write_text(text)
        part.replace(self.commands / name)

    def show(self, count: int) -> list[str]:
        self.write("nodes", self.lines(count))
        return in_order((f"node-{number:02d}", 4) for number in range(count))

    def hang(self) -> None:
        os.mkfifo(self.commands / "pipe")

    def recover(self) -> None:
        (self.commands / "refusal").unlink(missing_ok=True)
        pipe = self.commands / "pipe"
        if pipe.exists():
            waiting = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
            pipe.unlink()  # no more come to wait,
            os.close(waiting)  # and who waits sees the end

    def close(self) -> None:
        super().close()
        self.recover()

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        def refusal(words: str) -> Callable[[], None]:
            return lambda: self.write("refusal", f"{words}\n")

        def nodes(text: str) -> Callable[[], None]:
            def write() -> None:
                self.recover()
                self.write("nodes", text)

            return write

        lines = self.lines(7)
        return {
            "no controller": refusal("slurm_load_node error: Unable to contact slurm controller (connect failure)"),
            "wrong credentials": refusal("slurm_load_node error: Invalid authentication credential"),
            "throttled": refusal("slurm_load_node error: RPC rate limit exceeded"),
            "truncated": nodes(lines[: len(lines) // 2]),
            "a node is missing": nodes(lines[: lines.rindex("NodeName")]),
            "no state": nodes(lines.replace("State=", "Status=")),
            "nothing": nodes(""),
        }


class SourceScene(Scene):
    """Two plans together, each of which may be without hosts; the first one is told how to behave."""

    script = "from_source"
    refresh_s = 0.0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.plans = (folder / "first plan.txt", folder / "second.txt")

    @property
    def words(self) -> list[str]:
        return ["limit(union(schedule:first plan.txt, schedule:second.txt), 39 hosts)"]

    @property
    def variables(self) -> dict[str, str]:
        return {"EDL_HVD_DISCOVERY_SOURCE": self.words[0]}

    def show(self, count: int) -> list[str]:
        hosts = [(f"node-{number}", number + 1) for number in range(count)]
        for index, plan in enumerate(self.plans):
            coming = "".join(f"0 add {host}:{slots}\n" for host, slots in hosts[index::2])
            self.write(f"{coming}1h add late\n", plan)
        return in_order(hosts)

    def write(self, text: str, plan: Path | None = None) -> None:
        part = self.folder / "part"
        part.write_text(text)
        part.replace(plan or self.plans[0])

    def hang(self) -> None:
        os.mkfifo(self.folder / "pipe")
        (self.folder / "pipe").replace(self.plans[0])

    def recover(self) -> None:
        """A plan that is written replaces whatever was there."""

    def poll_until_asked_in_vain(self) -> None:
        """The question is not in vain: the other plan answers, and the poll says what stands in for the first."""
        self.poll_until(lambda result: result.stderr != "")

    @property
    def doubts(self) -> dict[str, Callable[[], None]]:
        return {
            "missing": lambda: self.plans[0].unlink(missing_ok=True),
            "emptied": lambda: self.write(""),
            "half written": lambda: self.write("0 add node-0:1\n10 add nod"),
            "malformed": lambda: self.write("one two three four\n"),
        }


SCENES: dict[str, type[Scene]] = {
    scene.script: scene for scene in (KubernetesScene, UrlScene, MpiJobScene, SlurmScene, LeasesScene, SourceScene)
}

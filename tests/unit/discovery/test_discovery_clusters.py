"""What pods, an MPI operator's files, Slurm's words and a server's list of hosts mean."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from edl_hvd.discovery.registry import make_source
from edl_hvd.discovery.source import Answer, HostDetails
from edl_hvd.discovery.sources import mpijob, slurm
from edl_hvd.discovery.sources.kubernetes import Kubernetes, count_resource, describe, reason_to_leave_out
from edl_hvd.discovery.sources.mpijob import MpiJob, read_script
from edl_hvd.discovery.sources.slurm import Slurm, parse_nodes, slots_of_nodes
from edl_hvd.discovery.sources.url import Url, read_listed
from edl_hvd.discovery.sources.web import read_address, read_token, ssl_context
from edl_hvd.errors import DiscoveryError, UsageError
from edl_hvd.hosts import HostSlots
from edl_hvd.http_client import HttpAnswer


def answer(body: str | bytes, is_whole: bool = True) -> HttpAnswer:
    return HttpAnswer(200, {}, body.encode() if isinstance(body, str) else body, is_whole)


class TestUrl:
    @pytest.mark.parametrize(
        ("body", "hosts"),
        [
            ("node-1:4\n# spare\nnode-2:2 # two\n\n", "node-1:4 node-2:2"),
            ("node-1:4", "node-1:4"),
            ('{"a": 4, "b": 1}', "a:4 b:1"),
            ('{"hosts": [{"host": "a", "slots": 4}, {"host": "b", "slots": 1, "zone": null}]}', "a:4 b:1"),
            ('{"hosts": 2}', "hosts:2"),
            ("{}", ""),
            (' {"hosts": []}', ""),
        ],
    )
    def test_reads_text_and_both_forms_of_json(self, body: str, hosts: str) -> None:
        assert " ".join(map(str, read_listed(answer(body), None).hosts)) == hosts

    def test_slots_of_hosts_that_name_none(self) -> None:
        for body in ("a\nb:1\n", '{"a": null, "b": 1}', '{"hosts": [{"host": "a"}, {"host": "b", "slots": 1}]}'):
            assert read_listed(answer(body), 8).hosts == (HostSlots("a", 8), HostSlots("b", 1))

    def test_reads_what_else_is_known_of_a_host(self) -> None:
        body = """{"hosts": [{"host": "a", "slots": 4, "price_usd_per_h": 0.5, "kind": "p3", "zone": "z1",
                   "since": "2026-01-31T12:00:00Z", "notice_s": 90}, {"host": "b", "slots": 1, "since": 17.5}]}"""
        listed = read_listed(answer(body), None)
        assert listed.details == {"a": HostDetails("p3", "z1", 0.5, 1769860800.0), "b": HostDetails(since_s=17.5)}
        assert listed.notices == {"a": 90.0}

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ("", "lists no host"),
            ("# none\n", "lists no host"),
            ("<html>", "names no slots"),
            ("a:4\nb\n", "'b' names no slots"),
            ("a:b:c\n", "not understood"),
            (b"\xff\xfe", "no text"),
            ("{", "no JSON"),
            ('{"a": 1, "a": 2}', "stands twice"),
            ('{"a": NaN}', "NaN is no number"),
            ('{"a": 0}', "has 0 slots"),
            ('{"a": true}', "slots True"),
            ('{"a": 1.5}', "slots 1.5"),
            ('{"a b": 1}', "'a b' is not usable"),
            ('{"hosts": ["a"]}', "a is no host"),
            ('{"hosts": [{"slots": 1}]}', "is no host"),
            ('{"hosts": [{"host": "a"}]}', "the slots None"),
            ('{"hosts": [{"host": "a", "slots": 1, "price": 1}]}', "has price; accepted: host, slots, price_usd_per_h"),
            ('{"hosts": [{"host": "a", "slots": 1, "price_usd_per_h": "1"}]}', "expected a number"),
            ('{"hosts": [{"host": "a", "slots": 1, "notice_s": -1}]}', "expected a number"),
            ('{"hosts": [{"host": "a", "slots": 1, "zone": 3}]}', "expected text"),
            ('{"hosts": [{"host": "a", "slots": 1, "since": "yesterday"}]}', "there since 'yesterday'"),
            ('{"hosts": [{"host": "a", "slots": 1, "since": "2026-01-31T12:00:00"}]}', "there since"),
        ],
    )
    def test_refuses_what_it_cannot_be_sure_of(self, body: str | bytes, words: str) -> None:
        with pytest.raises((DiscoveryError, UsageError), match=words):
            read_listed(answer(body), None)

    def test_text_of_unknown_length_may_lack_its_end_and_json_may_not(self) -> None:
        with pytest.raises(DiscoveryError, match="Content-Length"):
            read_listed(answer("a:1\nb:1\n", is_whole=False), None)
        assert read_listed(answer('{"a": 1}', is_whole=False), None).hosts == (HostSlots("a", 1),)

    @pytest.mark.parametrize(
        "text", ["", "hosts.example.com", "ftp://h/x", "https://", "http://h:port/", "https://h/a b", "https://é/"]
    )
    def test_refuses_what_is_no_address(self, text: str) -> None:
        with pytest.raises(UsageError, match=r"--url .* is not usable; expected e\.g\. https://"):
            read_address(text, "--url")

    def test_a_secret_belongs_into_a_file_and_onto_an_encrypted_line(self) -> None:
        with pytest.raises(UsageError, match="--token-file") as raised:
            Url("https://user:secret@h/x")
        assert "secret@" not in str(raised.value)
        with pytest.raises(UsageError, match="unencrypted"):
            Url("http://hosts.example.com/x", token_file="token")
        Url("http://127.0.0.1:8000/x", token_file="token")

    @pytest.mark.parametrize("text", ["", "\n", "two words\n", "a\nb\n", "\x07\n"])
    def test_refuses_what_is_no_token(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "token").write_text(text)
        with pytest.raises(DiscoveryError, match="does not hold a token"):
            read_token(str(tmp_path / "token"))

    def test_refuses_what_are_no_certificates(self, tmp_path: Path) -> None:
        (tmp_path / "ca.crt").write_text("nothing\n")
        with pytest.raises(DiscoveryError, match="holds none"):
            ssl_context(str(tmp_path / "ca.crt"))
        with pytest.raises(DiscoveryError, match="No such file"):
            ssl_context(str(tmp_path / "none"))


def a_pod(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "a", "creationTimestamp": "2026-01-31T12:00:00Z"},
        "spec": {"containers": [{}], "nodeSelector": {"node.kubernetes.io/instance-type": "p3"}, "nodeName": "n1"},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], **status},
    }


class TestKubernetes:
    @pytest.mark.parametrize(
        ("status", "reason"),
        [
            ({}, ""),
            ({"phase": "Pending"}, "it is Pending"),
            ({"conditions": []}, "it is not ready"),
            ({"conditions": [{"type": "Ready", "status": "False"}]}, "it is not ready"),
            (
                {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeLost"}]},
                "it is not ready: NodeLost",
            ),
        ],
    )
    def test_a_pod_counts_when_it_runs_and_is_ready(self, status: dict[str, Any], reason: str) -> None:
        assert reason_to_leave_out(a_pod(**status)) == reason

    def test_a_pod_that_is_being_deleted_does_not_count(self) -> None:
        pod = a_pod()
        pod["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:30Z"
        assert reason_to_leave_out(pod) == "it is being deleted, and gone by 2026-01-31T12:00:30Z"

    def test_slots_are_what_all_containers_may_use(self) -> None:
        pod = {"spec": {"containers": [{"resources": {"limits": {"amd.com/gpu": "2"}}}, {"resources": {}}, {},
                                       {"resources": {"limits": {"amd.com/gpu": "1", "cpu": "500m"}}}]}}  # fmt: skip
        assert (count_resource(pod, "amd.com/gpu"), count_resource(pod, "nvidia.com/gpu")) == (3, 0)

    def test_tells_where_a_pod_is_and_since_when(self) -> None:
        assert describe(a_pod()) == HostDetails(kind="p3", zone="n1", since_s=1769860800.0)

    def test_a_token_never_goes_over_an_unencrypted_line_to_another_machine(self) -> None:
        with pytest.raises(UsageError, match="unencrypted"):
            Kubernetes("app=a", "http://10.0.0.1:80", "default")
        with pytest.raises(UsageError, match="--namespace 'a/b' is not usable"):
            Kubernetes("app=a", "https://10.0.0.1", "a/b")

    def test_finds_the_api_server_as_every_pod_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        words = ["app=a", "--namespace", "default"]
        for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(UsageError, match="kubectl proxy"):
            make_source("kubernetes", words, [])
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
        for host, server in (("10.0.0.1", "https://10.0.0.1:443"), ("fd00::1", "https://[fd00::1]:443")):
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
            source = make_source("kubernetes", words, []).source
            assert isinstance(source, Kubernetes)
            assert source._server == server

    def test_outside_a_pod_the_namespace_has_to_be_given(self) -> None:
        with pytest.raises(UsageError, match="no --namespace is given"):
            make_source("kubernetes", ["app=a", "--server", "http://127.0.0.1:8001"], [])


class TestMpiJob:
    LISTED = (HostSlots("job-0.job", 4), HostSlots("job-1.job", 2))

    def test_running_workers_have_the_slots_of_the_hostfile(self) -> None:
        text = "#!/bin/sh\necho job-1.job\necho job-0.job:8\n"
        assert read_script(text, "script", self.LISTED) == (HostSlots("job-1.job", 2), HostSlots("job-0.job", 8))
        assert read_script("#!/bin/sh\n", "script", self.LISTED) == ()

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", "does not begin with"),
            ("echo job-0.job\n", "does not begin with"),
            ("#!/bin/sh\nrm -r x\n", "line 2: 'rm -r x' is not understood"),
            ("#!/bin/sh\necho job-0.job; rm x\n", "line 2: .* is not understood"),
            ("#!/bin/sh\necho $(id)\n", "line 2: host name"),
            ("#!/bin/sh\necho job-7.job\n", "line 2: job-7.job has no slots, and the hostfile does not list it"),
            ("#!/bin/sh\necho job-0.job\necho job-0.job\n", "line 3: job-0.job is printed twice"),
        ],
    )
    def test_the_script_is_read_and_not_run(self, text: str, words: str) -> None:
        with pytest.raises(DiscoveryError, match=words):
            read_script(text, "script", self.LISTED)

    def test_without_the_script_every_worker_counts_in_both_forms_of_the_hostfile(self, tmp_path: Path) -> None:
        (tmp_path / "hostfile").write_text("job-0.job slots=4\njob-1.job:2\n")
        assert MpiJob(str(tmp_path)).answer().hosts == self.LISTED
        assert MpiJob(str(tmp_path), slots=8).answer().hosts == (HostSlots("job-0.job", 8), HostSlots("job-1.job", 8))

    def test_both_files_are_of_one_version(self, tmp_path: Path) -> None:
        """While it reads the one that ``..data`` pointed to, that folder goes and another takes its place."""
        for version, slots in (("old", 1), ("new", 2)):
            (tmp_path / version).mkdir()
            (tmp_path / version / "hostfile").write_text(f"job-0.job slots={slots}\n")
        (tmp_path / "..data").symlink_to("old")

        class Swapped(MpiJob):
            def _read(self, folder: str) -> tuple[HostSlots, ...]:
                if folder.endswith("old"):
                    (tmp_path / "..next").symlink_to("new")
                    os.replace(tmp_path / "..next", tmp_path / "..data")
                    (tmp_path / "old" / "hostfile").unlink()
                return super()._read(folder)

        assert Swapped(str(tmp_path)).answer().hosts == (HostSlots("job-0.job", 2),)

    def test_where_no_job_is_a_folder_has_to_be_given(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(mpijob, "FOLDER", str(tmp_path / "none"))
        with pytest.raises(UsageError, match="the launcher of every MPIJob"):
            make_source("mpijob", [], [])
        monkeypatch.setattr(mpijob, "FOLDER", str(tmp_path))
        assert make_source("mpijob", ["--slots", "4"], []).source == MpiJob(str(tmp_path), 4)


class TestSlurm:
    @pytest.mark.parametrize(
        ("variables", "slots"),
        [
            ({"GPUS_PER_NODE": "gpu:a100:4", "GPUS_ON_NODE": "2"}, (4,)),
            ({"GPUS_PER_NODE": "a100:2,v100:1"}, (3,)),
            ({"GPUS_ON_NODE": "8", "TASKS_PER_NODE": "1(x2)"}, (8,)),
            ({"GPUS_ON_NODE": "0", "TASKS_PER_NODE": "1(x2)"}, (1, 1)),
            ({"JOB_GPUS": "0,1,4-7"}, (6,)),
            ({"TASKS_PER_NODE": "2(x3),1"}, (2, 2, 2, 1)),
            ({"TASKS_PER_NODE": "4"}, (4,)),
        ],
    )
    def test_slots_are_the_gpus_or_the_tasks_of_the_job(
        self, variables: dict[str, str], slots: tuple[int, ...]
    ) -> None:
        assert slots_of_nodes({f"SLURM_{name}": value for name, value in variables.items()}) == slots

    @pytest.mark.parametrize(
        ("variables", "words"),
        [
            ({}, "neither GPUs nor tasks; give --slots"),
            ({"GPUS_PER_NODE": "all"}, "SLURM_GPUS_PER_NODE='all' is not understood"),
            ({"JOB_GPUS": "3-0"}, "SLURM_JOB_GPUS='3-0' is not understood"),
            ({"TASKS_PER_NODE": "2(x3),"}, r"SLURM_TASKS_PER_NODE='2\(x3\),' is not understood"),
        ],
    )
    def test_refuses_variables_that_say_nothing(self, variables: dict[str, str], words: str) -> None:
        with pytest.raises(UsageError, match=words):
            slots_of_nodes({f"SLURM_{name}": value for name, value in variables.items()})

    @pytest.mark.parametrize(
        ("state", "is_gone"),
        [
            ("IDLE", False),
            ("ALLOCATED", False),
            ("MIXED", False),
            ("IDLE*", False),
            ("ALLOCATED+COMPLETING", False),
            ("DOWN", True),
            ("DOWN*", True),
            ("IDLE+DRAIN", True),
            ("ALLOCATED+DRAIN+RESERVED", True),
            ("DOWN*+DRAIN", True),
            ("FAIL", True),
            ("IDLE+POWERED_DOWN", True),
        ],
    )
    def test_a_node_that_is_down_drained_or_failing_is_gone(self, state: str, is_gone: bool) -> None:
        (node,) = parse_nodes(f"NodeName=a State={state} Reason=bad fan [root@2026-01-31T12:00:00]\n").values()
        assert (node.is_gone, node.reason) == (is_gone, "bad fan")

    def test_reads_a_line_as_slurm_writes_it(self) -> None:
        line = (
            "NodeName=gpu01 Arch=x86_64 CoresPerSocket=16 CPUAlloc=8 Gres=gpu:a100:4(S:0-1) NodeAddr=gpu01 "
            "OS=Linux 5.15.0 #1 SMP RealMemory=500000 State=MIXED ThreadsPerCore=1 Partitions=gpu  Comment=(null)\n"
        )
        (node,) = parse_nodes(line).values()
        assert (node.name, node.state, node.reason, node.features) == ("gpu01", "MIXED", "", "gpu:a100:4(S:0-1)")

    @pytest.mark.parametrize("text", ["NodeName=a State=IDLE", "State=IDLE\n", "NodeName=a\n", "no nodes\n"])
    def test_refuses_half_an_answer(self, text: str) -> None:
        with pytest.raises(DiscoveryError, match=r"in the middle|is not understood"):
            parse_nodes(text)

    def commands(self, folder: Path, body: str) -> dict[str, str]:
        program = folder / "scontrol"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        return {"PATH": f"{folder}:{os.defpath}"}

    def test_tells_why_a_node_is_left_out_and_what_the_others_are(self, tmp_path: Path) -> None:
        environ = self.commands(
            tmp_path,
            'case "$*" in *hostnames*) echo a; echo b;; *) echo "NodeName=a Gres=gpu:4 State=IDLE"; '
            'echo "NodeName=b State=DOWN+DRAIN Reason=bad fan [root@now]";; esac',
        )
        source = Slurm("[a-b]", (4, 2), environ)
        assert source.answer() == Answer(
            (HostSlots("a", 4),),
            details={"a": HostDetails(kind="gpu:4")},
            left_out={"b": "it is DOWN+DRAIN: bad fan"},
        )

    def test_says_what_scontrol_said(self, tmp_path: Path) -> None:
        environ = self.commands(tmp_path, "echo 'Unable to contact\n slurm controller' >&2; exit 1")
        with pytest.raises(
            DiscoveryError, match="'scontrol show hostnames a' ended with exit code 1: Unable to contact slu"
        ):
            Slurm("a", (1,), environ).answer()
        with pytest.raises(DiscoveryError, match="no program 'scontrol' on PATH"):
            Slurm("a", (1,), {"PATH": str(tmp_path / "none")}).answer()

    def test_a_command_that_hangs_is_ended(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(slurm, "COMMAND_S", 0.01)
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(DiscoveryError, match=r"did not end within 0\.01 s"):
            Slurm("a", (1,), self.commands(tmp_path, f"exec cat {tmp_path}/pipe")).answer()

    def test_slots_for_other_nodes_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DiscoveryError, match="lists 2 nodes, with slots for 3; give --slots"):
            Slurm("[a-b]", (1, 1, 1), self.commands(tmp_path, "echo a; echo b")).answer()

    @pytest.mark.parametrize("nodelist", ["-a", "a b", "a;b", "$(x)", ""])
    def test_refuses_what_is_no_list_of_nodes(self, nodelist: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
        with pytest.raises(UsageError):
            make_source("slurm", [f"--nodelist={nodelist}", "--slots=1"], [])

    def test_in_a_job_nothing_needs_to_be_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[01-04]")
        monkeypatch.setenv("SLURM_GPUS_PER_NODE", "4")
        source = make_source("slurm", [], []).source
        assert isinstance(source, Slurm)
        assert (source._nodelist, source._slots) == ("gpu[01-04]", (4,))

"""What every program in ``discovery_scripts/`` promises, asked of each as a real process."""

from __future__ import annotations

import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from discovery_clouds import AutoScalingScene, CloudScene, Ec2Scene, GoogleScene
from discovery_clusters import SCENES as CLUSTER_SCENES
from discovery_scenes import SCRIPTS, HostsFileScene, Scene, ScheduleScene, in_order
from discovery_traces import TraceScene
from servers import AwsServer

from edl_hvd.discovery.polling.cached import ANSWER_S
from edl_hvd.discovery.registry import FIRST_S

SCENES: dict[str, type[Scene]] = {
    "from_file": HostsFileScene,
    "from_schedule": ScheduleScene,
    "from_trace": TraceScene,
    "from_google": GoogleScene,
    **CLUSTER_SCENES,
}
AWS_SCENES = {"from_ec2": Ec2Scene, "from_auto_scaling": AutoScalingScene}

# Flags whose variable is that of Google's own tools.
OF_GOOGLE = {"--metadata-host": "GCE_METADATA_HOST", "--endpoint": "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"}


@pytest.fixture(params=[*SCENES, *AWS_SCENES])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    if request.param in AWS_SCENES:
        made: Scene = AWS_SCENES[request.param](tmp_path, request.getfixturevalue("aws"))
    else:
        made = SCENES[request.param](tmp_path)
    yield made
    made.close()


@pytest.fixture
def ec2(aws: AwsServer, tmp_path: Path) -> Iterator[Ec2Scene]:
    made = Ec2Scene(tmp_path, aws)
    yield made
    made.close()


@pytest.fixture
def group(aws: AwsServer, tmp_path: Path) -> Iterator[AutoScalingScene]:
    made = AutoScalingScene(tmp_path, aws)
    yield made
    made.close()


def assert_answer(result: subprocess.CompletedProcess[str], lines: list[str]) -> None:
    assert (result.returncode, result.stdout) == (0, "".join(f"{line}\n" for line in lines)), result


def assert_refused(result: subprocess.CompletedProcess[str], code: int = 1) -> None:
    """Nothing on standard output, one line that names the script on standard error."""
    assert (result.returncode, result.stdout) == (code, ""), result
    assert re.fullmatch(r"from_[a-z0-9_]+: .+\n", result.stderr), result


def test_every_program_is_in_this_suite() -> None:
    programs = {path.name for path in SCRIPTS.iterdir() if os.access(path, os.X_OK)}
    assert programs == {*SCENES, *AWS_SCENES}


def test_an_answer_is_the_sorted_hosts_and_nothing_else(scene: Scene) -> None:
    lines = scene.show(12)
    result = scene.poll()
    assert_answer(result, lines)
    assert result.stderr == ""


def test_horovod_reads_the_answer(scene: Scene) -> None:
    lines = scene.show(3)
    program = (
        "import sys; from horovod.runner.elastic.discovery import HostDiscoveryScript as Script\n"
        "print(sorted(Script(sys.argv[1], 1).find_available_hosts_and_slots().items()))"
    )
    command = shlex.join([scene.path(), *scene.words])
    result = subprocess.run(
        [sys.executable, "-c", program, command],
        env=scene.environment,
        cwd=scene.folder,
        capture_output=True,
        text=True,
    )
    pairs = [(host, int(slots)) for host, slots in (line.split(":") for line in lines)]
    assert result.stdout == f"{sorted(pairs)}\n", result


def test_variables_stand_in_for_flags_and_flags_beat_them(scene: Scene) -> None:
    lines = scene.show(2)
    assert_answer(scene.poll([], **scene.variables), lines)
    wrong = dict.fromkeys(scene.variables, "no such thing")
    assert scene.poll([], **wrong).returncode != 0
    assert_answer(scene.poll(None, **wrong), lines)


def test_no_hosts_are_never_a_success(scene: Scene) -> None:
    scene.show(0)
    assert_refused(scene.poll())


def test_every_doubt_at_the_start_is_a_failure(scene: Scene) -> None:
    for doubt in scene.doubts.values():
        scene.show(7)
        doubt()
        assert_refused(scene.poll())
        scene.recover()
        scene.forget()


def test_every_doubt_later_is_bridged_by_the_last_good_answer_until_it_is_too_old(scene: Scene) -> None:
    lines = scene.show(7)
    assert_answer(scene.poll(), lines)
    for name, doubt in scene.doubts.items():
        doubt()
        scene.let_pass(scene.refresh_s)
        scene.poll_until_asked_in_vain()
        bridged = scene.poll()
        assert_answer(bridged, lines)
        assert "good for 300 s" in bridged.stderr, name
    scene.let_pass(301)
    assert_refused(scene.poll_until(lambda result: result.returncode != 0))
    scene.kill_askers()  # one that asks while the hosts below come one by one would keep only some of them
    scene.recover()
    lines = scene.show(3)
    scene.let_pass(scene.refresh_s)
    assert_answer(scene.poll_until(lambda result: result.returncode == 0), lines)


def test_a_source_that_hangs_does_not_hang_a_poll(scene: Scene) -> None:
    lines = scene.show(2)
    assert_answer(scene.poll(), lines)
    scene.hang()
    scene.let_pass(scene.refresh_s + FIRST_S)  # so that what follows is not the first poll, which waits that long
    assert_answer(scene.poll(), lines)
    scene.let_pass(301)
    assert_refused(scene.poll())


def test_a_source_that_hangs_from_the_start_fails_in_bounded_time(scene: Scene) -> None:
    scene.hang()
    assert_refused(scene.poll(EDL_HVD_DISCOVERY_FIRST="1"))


def test_a_kill_while_asking_leaves_the_last_good_answer(scene: Scene) -> None:
    lines = scene.show(2)
    assert_answer(scene.poll(), lines)
    scene.hang()
    scene.let_pass(scene.refresh_s + FIRST_S)  # so that what follows is not the first poll, which waits that long
    assert_answer(scene.poll(), lines)
    assert scene.kill_askers() == 1
    assert_answer(scene.poll(), lines)
    scene.kill_askers()
    scene.recover()
    lines = scene.show(3)
    scene.let_pass(scene.refresh_s)
    assert_answer(scene.poll_until(lambda result: result.stdout.count("\n") == 3), lines)


def test_a_damaged_record_is_asked_for_again(scene: Scene) -> None:
    lines = scene.show(2)
    assert_answer(scene.poll(), lines)
    scene.kill_askers()
    for path in scene.cache.glob("*/*.answer"):
        path.write_text(path.read_text()[:-3])
    assert_answer(scene.poll(), lines)


def test_polls_at_the_same_time_get_the_same_answer(scene: Scene) -> None:
    lines = scene.show(3)
    polls = [scene.start_poll() for _ in range(6)]
    outputs = [poll.communicate(timeout=120) for poll in polls]
    assert outputs == [("".join(f"{line}\n" for line in lines), "")] * 6


@pytest.mark.parametrize("words", [["--no-such-flag", "1"], ["--stale"], ["--stale", "soon"], ["--stale", "-1"]])
def test_wrong_arguments_are_one_line_and_exit_code_2(scene: Scene, words: list[str]) -> None:
    scene.show(1)
    result = scene.poll([*scene.words, *words])
    assert_refused(result, code=2)
    assert "--help" in result.stderr


def test_no_arguments_are_one_line_and_exit_code_2(scene: Scene) -> None:
    assert_refused(scene.poll([]), code=2)


def test_help_is_the_header_and_names_every_flag_and_variable(scene: Scene) -> None:
    result = scene.poll(["--help"])
    assert result.returncode == 0
    assert result.stdout.startswith(f"{scene.script}: ")
    for heading in ("Usage", "Variables", "Permissions"):
        assert f"\n{heading}" in result.stdout
    flags = re.findall(r"--[a-z-]+", scene.poll(["--no-such-flag"]).stderr.partition("accepted:")[2].partition(";")[0])
    assert flags
    positional = {"--file", "--plan", "--trace"}
    assert [flag for flag in flags if flag not in result.stdout and flag not in positional] == []
    variables = {f"EDL_HVD_DISCOVERY_{flag[2:].upper().replace('-', '_')}" for flag in flags if flag not in OF_GOOGLE}
    variables |= {OF_GOOGLE[flag] for flag in flags if flag in OF_GOOGLE}
    named = re.findall(r"^  (EDL_HVD_DISCOVERY_[A-Z_]+|GCE_[A-Z_]+|CLOUDSDK_[A-Z_]+)  ", result.stdout, re.MULTILINE)
    assert sorted(named) == sorted({*variables, "EDL_HVD_DISCOVERY_CACHE"})


def test_a_link_to_a_program_works_from_anywhere(scene: Scene) -> None:
    lines = scene.show(1)
    link = scene.folder / "linked"
    link.symlink_to(scene.path())
    result = subprocess.run(
        ["./linked", *scene.words], env=scene.environment, cwd=scene.folder, capture_output=True, text=True
    )
    assert_answer(result, lines)


def test_answers_are_kept_where_nobody_else_can_put_one(scene: Scene) -> None:
    lines = scene.show(1)
    assert_answer(scene.poll(), lines)
    (folder,) = scene.cache.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    refused = scene.poll()
    assert_refused(refused)
    assert "EDL_HVD_DISCOVERY_CACHE" in refused.stderr
    folder.chmod(0o700)


def ask_rarely(scene: CloudScene) -> None:
    """So that the polls of a test take less than a refresh on any machine."""
    scene.refresh_s = 200.0
    scene.environment["EDL_HVD_DISCOVERY_REFRESH"] = "200"


def test_ec2_is_asked_once_per_refresh_however_many_polls(ec2: Ec2Scene) -> None:
    ask_rarely(ec2)
    lines = ec2.show(3)
    for _ in range(5):
        assert_answer(ec2.poll(), lines)
    assert len(ec2.gate.questions) == 1
    ec2.let_pass(100)
    assert_answer(ec2.poll(), lines)
    assert len(ec2.gate.questions) == 1
    more = ec2.show(4)
    ec2.let_pass(100)
    assert_answer(ec2.poll_until(lambda result: result.stdout.count("\n") == 4), more)
    assert len(ec2.gate.questions) == 2


def test_ec2_is_asked_once_per_refresh_while_it_fails(ec2: Ec2Scene) -> None:
    ask_rarely(ec2)
    ec2.show(1)
    ec2.gate.behave("not allowed")
    for _ in range(4):
        assert "UnauthorizedOperation" in ec2.poll().stderr
    assert len(ec2.gate.questions) == 1


@pytest.mark.parametrize("scene", ["from_google", *AWS_SCENES], indirect=True)
def test_a_slow_cloud_is_waited_for_at_the_start_and_bridged_later(scene: CloudScene) -> None:
    lines = scene.show(2)
    scene.behave("slow")
    assert_answer(scene.poll(), lines)
    more = scene.show(3)
    scene.let_pass(scene.refresh_s)
    scene.behave("slow")
    assert_answer(scene.poll(), lines)
    assert_answer(scene.poll_until(lambda result: result.stdout.count("\n") == 3), more)


def test_the_first_poll_waits_for_a_file_that_is_read_slowly(tmp_path: Path) -> None:
    """As one of 100,000 lines is on a busy machine; the pipe opens when the poll reads it."""
    hosts = tmp_path / "hosts"
    os.mkfifo(hosts)
    environment = {**os.environ, "EDL_HVD_DISCOVERY_CACHE": str(tmp_path)}
    with subprocess.Popen(
        [SCRIPTS / "from_file", hosts], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as poll:
        with open(hosts, "w") as pipe:
            time.sleep(3 * ANSWER_S)
            pipe.write("node-1:4\n")
        assert poll.communicate() == ("node-1:4\n", "")
        assert poll.returncode == 0


REMOTE = [name for name, kind in {**SCENES, **AWS_SCENES}.items() if kind.refresh_s]


@pytest.mark.parametrize("scene", REMOTE, indirect=True)
def test_a_warm_poll_imports_neither_boto3_nor_this_package(scene: Scene) -> None:
    lines = scene.show(1)
    assert_answer(scene.poll(), lines)
    python = scene.folder / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -X importtime "$@"\n')
    python.chmod(0o755)
    warm = scene.poll(EDL_HVD_PYTHON=str(python))
    assert_answer(warm, lines)
    imported = {line.rpartition("|")[2].strip() for line in warm.stderr.splitlines()}
    assert "hashlib" in imported
    assert imported.isdisjoint({"boto3", "botocore", "torch", "edl_hvd", "http.client", "ssl"})


@pytest.mark.parametrize("scene", ["from_file", "from_schedule", "from_trace", "from_mpijob"], indirect=True)
def test_a_poll_of_files_that_have_not_changed_imports_nothing_of_this_package(scene: Scene) -> None:
    """dataclasses and typing alone take 20 ms of processor time; a poll with neither takes 15."""
    lines = scene.show(2)
    assert_answer(scene.poll(), lines)
    python = scene.folder / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -X importtime "$@"\n')
    python.chmod(0o755)
    plain, scene.environment["EDL_HVD_PYTHON"] = scene.environment["EDL_HVD_PYTHON"], str(python)

    def imports_nothing(poll: subprocess.CompletedProcess[str]) -> bool:
        """So it is from two seconds after the last change of a file on: before, another change need not show."""
        assert_answer(poll, lines)
        imported = {line.rpartition("|")[2].strip() for line in poll.stderr.splitlines()}
        assert "hashlib" in imported
        return imported.isdisjoint({"edl_hvd", "dataclasses", "typing", "inspect", "re"})

    scene.poll_until(imports_nothing)
    scene.environment["EDL_HVD_PYTHON"] = plain
    more = scene.show(3)
    assert_answer(scene.poll(), more)


@pytest.mark.parametrize("scene", REMOTE, indirect=True)
def test_a_warm_poll_takes_less_than_30_ms_of_processor_time(scene: Scene) -> None:
    """Or, on a slow machine, less than twice as much as Python that does nothing."""
    scene.show(12)
    scene.poll()
    nothing = [sys.executable, "-I", "-S", "-c", "pass"]
    polls_s = [processor_time_s(lambda: scene.poll().returncode) for _ in range(5)]
    bare_s = [processor_time_s(lambda: subprocess.run(nothing, check=True).returncode) for _ in range(5)]
    # The least of them: whatever else this machine does makes it more.
    assert min(polls_s) < max(0.030, 2 * min(bare_s)), (polls_s, bare_s)


def processor_time_s(run: Callable[[], int]) -> float:
    """Of a process that ends well."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run() == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_no_instances_count_when_ec2_says_so_twice(ec2: Ec2Scene) -> None:
    lines = ec2.show(2)
    assert_answer(ec2.poll(), lines)
    ec2.show(0)
    ec2.let_pass(10)
    once = ec2.poll_until(lambda result: result.stderr != "")
    assert_answer(once, lines)
    assert "says so again" in once.stderr
    ec2.let_pass(10)
    twice = ec2.poll_until(lambda result: result.returncode != 0)
    assert_refused(twice)
    assert "no hosts" in twice.stderr


@pytest.mark.parametrize("known", ["none", "all but one"])
def test_a_group_whose_members_ec2_does_not_know_keeps_its_hosts_for_as_long_as_that_lasts(
    group: AutoScalingScene, known: str
) -> None:
    """However often it says so again: two services that contradict each other are doubt, and no end of a host."""
    lines = group.show(24)
    assert_answer(group.poll(), lines)
    unknown = tuple(group.instances if known == "none" else group.instances[-1:])
    for _ in range(4):
        group.gate.unknown = unknown
        group.let_pass(group.refresh_s)
        group.poll_until_asked_in_vain()
        doubted = group.poll()
        assert_answer(doubted, lines)
        assert f"lists 24 instances in service, and EC2 knows only {24 - len(unknown)}" in doubted.stderr
    group.let_pass(301)
    assert_refused(group.poll_until(lambda result: result.returncode != 0))
    group.kill_askers()
    group.gate.unknown = ()
    group.let_pass(group.refresh_s)
    assert_answer(group.poll_until(lambda result: result.returncode == 0), lines)


def test_only_running_instances_with_every_tag_count(ec2: Ec2Scene) -> None:
    wanted = ec2.run_instances(2, team="vision")
    ec2.run_instances(1, team="speech")
    stopped, ended = ec2.run_instances(2, team="vision")
    ec2.ec2.stop_instances(InstanceIds=[stopped["InstanceId"]])
    ec2.ec2.terminate_instances(InstanceIds=[ended["InstanceId"]])
    result = ec2.poll([*ec2.words, "--tag", "team=vision"])
    assert_answer(result, in_order((instance["PrivateIpAddress"], 4) for instance in wanted))


def test_every_page_is_read(ec2: Ec2Scene) -> None:
    lines = ec2.show(23)
    assert_answer(ec2.poll(), lines)
    assert len(ec2.gate.questions) == 5


def test_slots_are_the_gpus_of_the_instance_type(ec2: Ec2Scene) -> None:
    one, eight = ec2.run_instances(1, "g4dn.xlarge") + ec2.run_instances(1, "p4d.24xlarge")
    words = ["--tag", f"job={ec2.job}", "--address", "private-dns"]
    assert_answer(ec2.poll(words), in_order([(one["PrivateDnsName"], 1), (eight["PrivateDnsName"], 8)]))


def test_a_type_without_gpus_asks_for_slots(ec2: Ec2Scene) -> None:
    ec2.run_instances(1, "m5.large")
    refused = ec2.poll(["--tag", f"job={ec2.job}"])
    assert_refused(refused)
    assert "--slots" in refused.stderr


def test_another_account_does_not_get_the_kept_answer(ec2: Ec2Scene) -> None:
    lines = ec2.show(1)
    assert_answer(ec2.poll(), lines)
    ec2.gate.behave("wrong credentials")
    assert_refused(ec2.poll(AWS_ACCESS_KEY_ID="another"))

"""What the flags of one job mean together, and what is said about those that cannot be."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from clocks import FakeClock

from edl_hvd.discovery.registry import KINDS
from edl_hvd.discovery.sources.ec2 import Ec2ByTag
from edl_hvd.discovery.sources.hostfile import FixedHosts, HostsFile
from edl_hvd.discovery.sources.schedule import Schedule
from edl_hvd.driver.command_line.options import UNBOUNDED, Options, read_options
from edl_hvd.driver.membership.state import Rules
from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots

REPOSITORY = Path(__file__).parents[3]
COMMAND = ("sh", "train.sh")
PATH = {"PATH": os.defpath}


def read(given: dict[str, str] | None = None, command: tuple[str, ...] = COMMAND, /, **environ: str) -> Options:
    return read_options(command, {"-np": "2", **(given or {})}, PATH | environ, clock=FakeClock())


def problems(given: dict[str, str], command: tuple[str, ...] = COMMAND, /, **environ: str) -> list[str]:
    with pytest.raises(UsageError) as raised:
        read(given, command, **environ)
    return str(raised.value).split("\n")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "find_hosts"
    path.write_text("#!/bin/sh\necho localhost:2\n")
    path.chmod(0o755)
    return str(path)


# --- how many workers ---


def test_without_hosts_all_workers_are_here():
    options = read()
    assert options.source == FixedHosts((HostSlots("localhost", 2),))
    assert (options.rules.num_proc, options.rules.min_np, options.rules.max_np) == (2, 2, 2)
    assert options.command == COMMAND


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ({"--hosts": "localhost:8"}, (2, 2)),  # as horovodrun: not elastic
        ({"--hosts": "localhost:8", "--min-np": "1"}, (1, UNBOUNDED)),
        ({"--hosts": "localhost:8", "--max-np": "8"}, (2, 8)),
        ({"--host-discovery-script": "echo localhost:1 | cat"}, (2, UNBOUNDED)),
        ({"--host-discovery-script": "echo localhost:1 | cat", "--min-np": "1", "--max-np": "4"}, (1, 4)),
    ],
)
def test_the_bounds_are_those_of_horovodrun_where_none_are_given(given, bounds):
    rules = read(given).rules
    assert (rules.min_np, rules.max_np) == bounds


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"--min-np": "4"}, "-np 2 is less than --min-np 4; raise the one or lower the other"),
        ({"--max-np": "1"}, "-np 2 is more than --max-np 1; lower the one or raise the other"),
        ({"-np": "0"}, "-np '0' cannot be used; expected a whole number, at least 1"),
        ({"-np": "two"}, "-np 'two' cannot be used; expected a whole number, at least 1"),
        ({"-np": ""}, "-np '' cannot be used; expected a whole number, at least 1"),
        ({"--spares": "-1"}, "--spares '-1' cannot be used; expected a whole number, at least 0"),
        ({"--host-failures": "0"}, "--host-failures '0' cannot be used; expected a whole number, at least 1"),
        ({"--reset-limit": "-1"}, "--reset-limit '-1' cannot be used; expected a whole number, at least 0"),
        ({"--last-call-timeout": "-0.5"},
         "--last-call-timeout '-0.5' cannot be used; expected a time of at least 0 s, e.g. '30' or '10min'"),
        ({"--last-call-timeout": "nan"},
         "--last-call-timeout 'nan' cannot be used; expected a time of at least 0 s, e.g. '30' or '10min'"),
        ({"--failure-window": "2 steps"}, "--failure-window '2 steps' cannot be used; expected a time of at least 1 s, "
         "e.g. '30' or '10min'"),
        ({"--elastic-timeout": "inf"}, "--elastic-timeout 'inf' cannot be used; expected a time of at least 1 s, "
         "e.g. '30' or '10min'"),
        ({"--ssh-port": "65536"}, "--ssh-port '65536' cannot be used; expected a whole number, 1 to 65535"),
        ({"--cycle-time-ms": "-1"}, "--cycle-time-ms '-1' cannot be used; expected a number, at least 0"),
        ({"--autotune-gaussian-process-noise": "2"}, "--autotune-gaussian-process-noise '2' cannot be used; expected "
         "a number, 0 to 1"),
        ({"--log-level": "info"}, "--log-level 'info' is not known; accepted: TRACE, DEBUG, INFO, WARNING, ERROR, "
         "FATAL"),
        ({"--blacklist-cooldown-range": "9 8"}, "--blacklist-cooldown-range 9 8 cannot be used; expected seconds, "
         "MIN MAX from 1, e.g. 60 300"),
        ({"--blacklist-cooldown-range": "0 8"}, "--blacklist-cooldown-range 0 8 cannot be used; expected seconds, "
         "MIN MAX from 1, e.g. 60 300"),
        ({"--hosts": "localhost:1"}, "-np 2 needs 2 slots, --hosts localhost:1 has 1; ask for less or add slots"),
        ({"--spares": "1"}, "-np 2 with --spares 1 needs 3 slots, the default, localhost, has 2; ask for less or add "
         "slots"),
    ],
)  # fmt: skip
def test_a_number_that_cannot_be_is_named_with_its_remedy(given, line):
    assert problems(given) == [line]


def test_the_number_of_workers_has_to_be_given():
    with pytest.raises(UsageError, match=r"^-np is missing; expected the number of workers, e\.g\. -np 4$"):
        read_options(COMMAND, {}, PATH)


def test_all_problems_of_a_line_are_told_together_one_line_each(tmp_path):
    given = {"-np": "3", "--min-np": "4", "--max-np": "2", "--ssh-identity-file": "/no/key", "--hosts": "a:x,b:0",
             "--last-call-timeout": "soon", "--mpi": "1"}  # fmt: skip
    told = problems(given, ())
    for flag in ("--min-np", "--max-np", "--ssh-identity-file", "--last-call-timeout", "--mpi", "no command"):
        assert any(flag in line for line in told), flag
    assert sum(line.startswith("--hosts") for line in told) == 2


def test_problems_found_before_are_told_first_and_on_one_line():
    with pytest.raises(UsageError) as raised:
        read_options(COMMAND, {}, PATH, found=["first\nthing"])
    assert str(raised.value).split("\n")[0] == "first thing"


# --- times and their variables ---


def test_defaults_are_those_of_the_rules_and_of_horovod():
    options = read()
    assert options.rules == Rules(num_proc=2, min_np=2, max_np=2, hosts_are_fixed=True)
    assert (options.rules.elastic_timeout_s, options.start_timeout_s) == (600, 30)
    assert options.worker_variables == {}


def test_a_flag_beats_its_variable_and_the_variable_the_default():
    variables = {"HOROVOD_ELASTIC_TIMEOUT": "70", "HOROVOD_START_TIMEOUT": "7"}
    options = read(**variables)
    assert (options.rules.elastic_timeout_s, options.start_timeout_s) == (70, 7)
    options = read({"--elastic-timeout": "10min", "--start-timeout": "9"}, **variables)
    assert (options.rules.elastic_timeout_s, options.start_timeout_s) == (600, 9)
    assert read(HOROVOD_ELASTIC_TIMEOUT="").rules.elastic_timeout_s == 600


def test_a_bad_variable_is_called_by_its_name():
    assert problems({}, HOROVOD_ELASTIC_TIMEOUT="long")[0].startswith("HOROVOD_ELASTIC_TIMEOUT 'long' cannot be used")


def test_every_bound_reaches_the_rules():
    given = {"-np": "3", "--min-np": "2", "--max-np": "5", "--spares": "1", "--last-call-timeout": "0",
             "--elastic-timeout": "60",
             "--host-failures": "4", "--failure-window": "5min", "--blacklist-cooldown-range": "20 80",
             "--reset-limit": "0", "--hosts": "localhost:8"}  # fmt: skip
    assert read(given).rules == Rules(
        num_proc=3, min_np=2, max_np=5, spares=1, last_call_timeout_s=0, elastic_timeout_s=60, host_failures=4,
        failure_window_s=300, cooldown_s=20, reset_limit=0, hosts_are_fixed=True,
    )  # fmt: skip


# --- where hosts come from ---


def test_a_list_of_hosts_gives_their_slots_and_twice_named_hosts_add_up():
    given = {"--hosts": "localhost:2,127.0.0.1,localhost:1", "--slots-per-host": "4"}
    assert read(given).source.answer().hosts == (HostSlots("localhost", 3), HostSlots("127.0.0.1", 4))


def test_a_hostfile_is_the_source_of_a_job(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("localhost slots=4\n")
    assert read({"--hostfile": str(path)}).source == FixedHosts((HostSlots("localhost", 4),))
    path.write_text("localhost slots=x\na:1\n")
    assert problems({"--hostfile": str(path)}) == [
        f"--hostfile '{path}': line 1: host line 'localhost:x' is not understood; expected 'host' or 'host:slots', "
        "e.g. 'node-1:4', with 1 to 100000 slots"
    ]


def test_a_discovery_script_is_run_as_it_was_given(script):
    options = read({"--host-discovery-script": f"{script} --zone a"})
    assert options.source.answer().hosts == (HostSlots("localhost", 2),)
    assert options.poll_every_s == 1.0


def test_the_slots_of_a_script_are_those_of_slots_per_host_or_have_to_be_named():
    given = {"--host-discovery-script": "echo localhost"}
    assert read(given | {"--slots-per-host": "4"}).source.answer().hosts == (HostSlots("localhost", 4),)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "it is empty"),
        ("'x", "the shell will not understand it"),
        ("./no/such", "there is no file './no/such'"),
        ("/tmp", "'/tmp' is a folder"),
        ("no_such_program -x", "there is no program 'no_such_program' on PATH"),
    ],
)
def test_a_discovery_script_that_is_missing_is_refused(value, words):
    told = problems({"--host-discovery-script": value})
    assert len(told) == 1
    assert told[0].startswith(f"--host-discovery-script {value!r}: {words}")


def test_a_discovery_script_that_is_not_executable_is_refused_with_the_command_that_helps(script):
    os.chmod(script, 0o644)
    told = problems({"--host-discovery-script": f"{script} --zone a"})
    assert [re.sub(r".*: ", "", line) for line in told] == [
        f"{script!r} is not executable; run 'chmod +x {script}'; expected a program that prints host:slots lines"
    ]


def test_a_script_in_this_folder_without_its_path_is_refused_with_the_path(script, monkeypatch):
    monkeypatch.chdir(os.path.dirname(script))
    assert "write ./find_hosts" in problems({"--host-discovery-script": "find_hosts"})[0]


@pytest.mark.parametrize(
    "value", ["A=1 ./nothing", "cd x && ./nothing", "exec ./nothing", "$HOME/nothing", "~/nothing"]
)
def test_what_only_the_shell_understands_is_left_to_it(value):
    read({"--host-discovery-script": value})


def test_a_source_in_process_takes_the_flags_of_its_script(tmp_path):
    hosts, plan = tmp_path / "hosts", tmp_path / "plan"
    hosts.write_text("a\n")
    plan.write_text("0 add a:1\n")
    slots = {"--slots-per-host": "4"}
    assert read({"--discover": f"file:{hosts}"}).source == HostsFile(str(hosts), 1)
    assert read({"--discover": f"file:{hosts}"} | slots).source == HostsFile(str(hosts), 4)
    assert read({"--discover": f"file:{hosts},slots=2"} | slots).source == HostsFile(str(hosts), 2)
    assert read({"--discover": f"schedule:{plan}"}).source == Schedule(str(plan), f"{plan}.started", 1000.0)
    started = f"schedule:plan={plan},start-file={tmp_path}/started"
    assert read({"--discover": started}).source == Schedule(str(plan), f"{tmp_path}/started")
    ec2 = read({"--discover": "ec2:tag=job=r50,tag=a=b,refresh=5,slots=2"})
    assert isinstance(ec2.source, Ec2ByTag)
    assert ec2.poll_every_s == 5
    assert not list(tmp_path.glob("*started")), "to read a plan does not start it"


def test_local_sources_are_asked_often_and_clouds_never_more_than_once_a_second(tmp_path):
    (tmp_path / "hosts").write_text("a\n")
    assert read({"--discover": f"file:{tmp_path}/hosts"}).poll_every_s == 0.2
    assert read({"--discover": "ec2:tag=job=r50,refresh=0"}).poll_every_s == 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("hosts.txt", "it is not understood; expected e.g. file:hosts.txt, schedule:plan.txt or ec2:tag=job=resnet50"),
        ("gcp:group=a", "it is not understood; expected e.g. file:"),
        ("file:", "it is not understood; expected e.g. file:"),
        ("file:/no/such", "cannot read the hosts file /no/such: No such file or directory"),
        ("schedule:/no/such", "cannot read the schedule /no/such: No such file or directory"),
        ("ec2:job", "unexpected word 'job'"),
        ("ec2:tag=job", "--tag 'job' is not understood"),
        ("ec2:tag=a=b,zone=c", "unknown flag '--zone=c'; accepted: --tag,"),
    ],
)
def test_a_source_that_is_not_understood_or_not_there_is_refused(value, words):
    told = problems({"--discover": value})
    assert len(told) == 1
    assert told[0].startswith(f"--discover {value!r}: {words}")


def test_every_kind_of_source_has_a_discovery_script():
    assert {f"from_{kind}" for kind in KINDS} == {
        script.name for script in (REPOSITORY / "discovery_scripts").glob("from_*")
    }


def test_hosts_from_two_places_at_once_are_refused():
    told = problems({"--hosts": "localhost:2", "--discover": "ec2:tag=a=b"})
    assert told == ["--hosts 'localhost:2' and --discover 'ec2:tag=a=b' both say where the hosts are; keep one of them"]
    assert "all say where" in problems({"--hosts": "a:2", "--hostfile": "b", "--discover": "ec2:tag=a=b"})[0]


# --- what only this machine knows ---


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names that resolve, besides numbers and localhost; tests add theirs."""
    known = {"localhost"}
    ask = socket.getaddrinfo

    def look_up(host: str, *arguments: Any, **more: Any) -> Any:
        if host in known or host.replace(".", "").isdecimal():
            return ask("127.0.0.1", *arguments, **more)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "127.0.0.1" if host == "localhost" else "192.0.2.1")
    return known


def fake_ssh(folder: Path, answer: str) -> dict[str, str]:
    """PATH with an ssh whose configuration says ``answer`` about every host."""
    program = folder / "ssh"
    program.write_text(f'#!/bin/sh\n[ "$1" = -G ] && printf \'user me\\n{answer}\\n\' | sed "s/HOST/$2/"\n')
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.defpath}"}


def test_hosts_that_nobody_knows_are_refused_each_on_its_line(names, tmp_path):
    names.add("node-1")
    given = {"--hosts": "node-1:1,node-2:1,node-3:1"}
    told = problems(given, **fake_ssh(tmp_path, "hostname HOST"))
    assert told == [
        f"--hosts node-1:1,node-2:1,node-3:1: unknown host {host!r} (Name or service not known); "
        "correct the name, or make it known in DNS, /etc/hosts or ~/.ssh/config"
        for host in ("node-2", "node-3")
    ]
    assert problems(given, PATH="/nowhere") == told, "without any ssh it is no different"


@pytest.mark.parametrize(
    "answer", ["hostname 192.0.2.7", "hostname HOST\\nproxyjump gate", "hostname HOST\\nproxycommand x"]
)
def test_a_host_that_only_ssh_knows_is_known(names, tmp_path, answer):
    read({"--hosts": "node-1:2"}, **fake_ssh(tmp_path, answer))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("no_such_program", "a b"), "command no_such_program 'a b': there is no program 'no_such_program' on PATH"),
        (("./nothing",), "command ./nothing: there is no file './nothing'"),
        (("/tmp",), "command /tmp: '/tmp' is a folder"),
        (("python3", "no_such.py", "-x"), "command python3 no_such.py -x: there is no file 'no_such.py'"),
    ],
)
def test_a_program_that_this_machine_has_not_is_refused_where_its_workers_run(names, tmp_path, command, words):
    (tmp_path / "python3").symlink_to("/bin/sh")
    told = problems({}, command, PATH=f"{tmp_path}:{os.defpath}")
    assert len(told) == 1
    assert told[0].startswith(words)
    # On another machine it may well be there.
    read({"--hosts": "192.0.2.1:2"}, command)
    read({"--host-discovery-script": "echo localhost"}, command)


def test_a_python_module_or_script_that_is_there_is_no_problem(tmp_path):
    (tmp_path / "python").symlink_to("/bin/sh")
    (tmp_path / "train.py").touch()
    for command in (("python", f"{tmp_path}/train.py"), ("python", "-m", "train"), ("python",)):
        read({}, command, PATH=f"{tmp_path}:{os.defpath}")


def test_an_interface_that_this_machine_has_not_is_refused_where_its_workers_run(names):
    assert problems({"--network-interfaces": "nic7"})[0].startswith(
        "--network-interfaces nic7: this machine has none of them; it has "
    )
    assert read({"--network-interfaces": "nic7,lo,nic7"}).network_interfaces == ("nic7", "lo")
    assert read({"--network-interfaces": "nic7", "--hosts": "192.0.2.1:2"}).network_interfaces == ("nic7",)


def test_files_and_folders_are_checked_before_anything_starts(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for flag, value, words in [
        ("--ssh-identity-file", f"{tmp_path}/key", "is not there; expected the path of a private key"),
        ("--ssh-identity-file", f"{tmp_path}", "is no file; expected the path of a private key"),
        ("--output-filename", f"{file}", f"cannot be a folder, as '{file}' is none; expected the path of a folder"),
        ("--output-filename", f"{file}/a/b", f"cannot be a folder, as '{file}' is none; expected the path of a folder"),
        ("--job-dir", "", "is empty; expected the path of a folder"),
        ("--record", f"{tmp_path}", "is a folder; expected the path of a file"),
        ("--record", f"{tmp_path}/a/b", f"would be in '{tmp_path}/a', which is no folder; expected the path of a file "
                                        "in one that is there"),
    ]:  # fmt: skip
        assert problems({flag: value}) == [f"{flag} {value!r} {words}"]
    given = {"--ssh-identity-file": str(file), "--output-filename": f"{tmp_path}/a/b", "--job-dir": str(tmp_path),
             "--record": str(file)}  # fmt: skip
    options = read(given)
    assert options.ssh_identity_file == options.record == str(file)
    assert (options.output_filename, options.job_dir) == (f"{tmp_path}/a/b", str(tmp_path))
    assert not (tmp_path / "a").exists(), "to read a line makes nothing"


def test_what_this_user_may_not_write_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: mode & os.W_OK == 0)
    assert "cannot be written by this user" in problems({"--record": f"{tmp_path}/record"})[0]
    assert f"as '{tmp_path}' cannot be by this user" in problems({"--job-dir": f"{tmp_path}/job"})[0]


def test_a_home_folder_is_understood(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key").touch()
    assert read({"--ssh-identity-file": "~/key"}).ssh_identity_file == str(tmp_path / "key")


def test_to_resume_needs_the_folder_of_a_job(tmp_path):
    assert problems({"--resume": "1"}) == [
        "--resume has nothing to go on without --job-dir; give the --job-dir of the job that stopped"
    ]
    for folder in (tmp_path / "none", tmp_path):
        (line,) = problems({"--resume": "1", "--job-dir": str(folder)})
        assert line.startswith(f"--resume has nothing to go on in --job-dir {folder}, which has no job.json; give the")


@pytest.mark.parametrize("flag", ["--mpi", "--mpi-args", "--binding-args", "--jsrun", "--check-build"])
def test_what_belongs_to_another_launcher_is_refused_with_one_line(flag):
    told = problems({flag: "1"})
    assert len(told) == 1
    assert told[0].startswith(f"{flag} is not for edlrun: ")


def test_agents_need_a_port_and_a_token(tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    assert problems({"--token-file": str(token)}) == [
        "--token-file is for agents; add --agents-port PORT, or leave it out"
    ]
    assert "add --token-file FILE" in problems({"--agents-port": "7077"})[0]
    token.write_text("short")
    assert (
        "the token has 5 characters; expected at least 16"
        in problems({"--agents-port": "7077", "--token-file": str(token)})[0]
    )
    assert "expected a whole number, 0 to 65535" in problems({"--agents-port": "70777", "--token-file": str(token)})[0]

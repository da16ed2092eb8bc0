"""Jobs of real processes that die at any byte, on a storage that fails beside it: what is listed restores.

A seed is one crash point: some processes of a job are killed with SIGKILL while they write checkpoints, restore one, or
take the URL over. Then everything listed has to restore bit for bit, whatever was reported as written has to be there,
and the next job, whose world may be another one, writes a checkpoint after which all of this still holds.

On S3 a tenth of all requests is refused or stalls, and in a quarter of the seeds the server is gone for a while. moto
keeps what it has in memory, so it is not killed itself: its connections break at an exact byte, and until it "is back"
no new one comes about, which is all that a client sees of a server that keeps what it has acknowledged.

``pytest --crash-seeds 1000`` tries a thousand on each kind of storage; ``-k 's3-17]'`` runs one of them again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from crash_plans import (
    KEEP,
    MIB,
    SHARE_OF_FAULTS,
    AfterSeconds,
    AtByte,
    AtFileByte,
    AtMessage,
    AtRequest,
    Plan,
    assert_is_what_was_written,
    plan_of,
    snapshot_of,
)
from crash_processes import FIRST_OWNER, FIRST_PAUSE_S, HANGS_S, Child, Clients, Nursery, Work, tell, told
from crash_wire import Wire
from faulty_proxy import Fault, FaultyProxy, Refuse, Stall
from servers import AwsServer

from edl_hvd.checkpoint import CheckpointWriter, lease, restore, restore_newest, steps
from edl_hvd.checkpoint.format import object_keys
from edl_hvd.checkpoint.lease import LeaseHolder
from edl_hvd.clock import SYSTEM_CLOCK
from edl_hvd.errors import ObjectMissingError
from edl_hvd.events import CheckpointFailed, CheckpointWritten, Event
from edl_hvd.storage import Storage, open_storage
from edl_hvd.storage.parts import Cut
from edl_hvd.storage.s3 import S3Storage

STALLS = (Stall("request", after_bytes=1000), Stall("answer", after_bytes=10), Stall("answer", after_bytes=None))
REFUSALS = (Refuse(503, "SlowDown"), Refuse(500, "InternalError"), Refuse(503, "ServiceUnavailable"))
FAULTS: tuple[Fault, ...] = (*REFUSALS, *STALLS)
NEXT_VARIANT = 2
ATTEMPTS = 5  # of the next job's checkpoint: while a tenth of all requests fails, one may take too long
A_MOMENT_S = 0.1
REPORTED_WITHIN_S = 60.0


@dataclass
class Counts:
    """What the seeds of this process came to."""

    seeds: int = 0
    struck: int = 0
    half_written: int = 0
    reported: int = 0
    faults: int = 0
    outages: int = 0
    survivors: int = 0


COUNTS = Counts()


@dataclass
class Cloud:
    """S3 behind a wire, for this process and those of the nursery."""

    server: AwsServer
    wire: Wire
    bucket: str
    clients: Clients
    nursery: Nursery
    past_the_wire: Any

    @contextmanager
    def failing(self, seed: int) -> Iterator[FaultyProxy]:
        """Reached through a proxy of its own, so that what stalls there ends with it."""
        with FaultyProxy(self.server.url) as proxy:
            where = urlsplit(proxy.url)
            self.wire.target = (where.hostname or "", where.port or 0)
            try:
                yield proxy
            finally:
                self.wire.clear()

    def empty(self) -> None:
        """All is in memory, also the parts of uploads that nobody ended."""
        client = self.past_the_wire
        for upload in client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", []):
            client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        found = client.list_objects_v2(Bucket=self.bucket).get("Contents", [])
        if found:
            client.delete_objects(Bucket=self.bucket, Delete={"Objects": [{"Key": entry["Key"]} for entry in found]})


@pytest.fixture(scope="module")
def cloud(aws: AwsServer) -> Iterator[Cloud]:
    with pytest.MonkeyPatch.context() as monkeypatch, Wire() as wire:
        monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
        monkeypatch.setattr("edl_hvd.storage.retries._FIRST_PAUSE_S", FIRST_PAUSE_S)
        environment = {**aws.environment, "AWS_ENDPOINT_URL": wire.url}
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        bucket = aws.new_bucket()
        with Nursery(bucket, environment) as nursery:
            yield Cloud(aws, wire, bucket, Clients.of(bucket), nursery, aws.client("s3"))


@dataclass
class Scene:
    """One seed: where its job writes, the job's processes, and their end."""

    plan: Plan
    storage: Storage
    nursery: Nursery
    folder: str
    logs: Path
    wire: Wire | None
    children: list[Child] = field(default_factory=list)
    struck: threading.Event = field(default_factory=threading.Event)

    def write(self, step: int, variant: int, ranks: int, owner: int) -> bool:
        """One checkpoint by threads of this process; whether it was reported as written."""
        writers = [CheckpointWriter(self.storage, KEEP) for _ in range(ranks)]
        for rank, writer in enumerate(writers):
            writer.begin(snapshot_of(step, variant, self.plan.large), rank, ranks, f"life{variant}-{step}", owner)
        assert all(writer.wait(HANGS_S) for writer in writers)
        events = [event for writer in writers for event in writer.poll()]
        for event in events:
            assert isinstance(event, CheckpointWritten | CheckpointFailed), event
        written = any(isinstance(event, CheckpointWritten) for event in events)
        if written:
            tell(str(self.logs / f"variant-{variant}"), written=step)
        return written

    def start(self) -> None:
        plan = self.plan
        self.children = self.nursery.fork([
            Work(plan.act, self.folder, self.wire is not None, plan.large, plan.moment, plan.victims, rank, plan.ranks,
                 first_step=1, variant=1, log=str(self.logs / f"rank-{rank}"))
            for rank in range(plan.ranks)
        ])  # fmt: skip
        if self.wire and isinstance(plan.moment, AtByte | AtMessage | AtRequest):
            self.wire.at(plan.moment, self.strike, plan.severed)
        if self.wire and plan.outage:
            self.wire.at(AtByte(plan.outage.at_byte), partial(self.break_down, self.wire, plan.outage.duration_s))
        self.nursery.go()

    def strike(self) -> None:
        for rank in self.plan.victims:
            self.children[rank].kill()
        if not self.plan.victims:
            self.signal_survivors(signal.SIGSTOP)
        self.struck.set()

    def break_down(self, wire: Wire, duration_s: float) -> None:
        wire.break_down(duration_s)
        COUNTS.outages += 1

    def wait_for_the_crash(self) -> None:
        """Until the victims are dead, by their moment or because they were through before it."""
        if isinstance(self.plan.moment, AfterSeconds):
            self.struck.wait(self.plan.moment.duration_s)
            self.strike()
        if not self.plan.victims:
            while not self.struck.is_set() and not all(child.wait(0.01) for child in self.children):
                pass
            COUNTS.struck += len(self.told("ended")) < len(self.children)
            return
        # Where a process dies by itself, at a byte of its own file, the others follow.
        first = getattr(self.plan.moment, "rank", self.plan.victims[0])
        assert self.children[first].wait(HANGS_S), f"rank {first} came neither to its moment nor to its end"
        COUNTS.struck += first not in self.told("ended")
        for rank in self.plan.victims:
            self.children[rank].kill()
            assert self.children[rank].wait(HANGS_S)

    def wait_a_moment(self) -> None:
        """Or until a survivor has ended."""
        for rank in set(range(len(self.children))) - set(self.plan.victims):
            self.children[rank].wait(A_MOMENT_S)

    def signal_survivors(self, number: int) -> None:
        for rank in set(range(len(self.children))) - set(self.plan.victims):
            COUNTS.survivors += 1
            self.children[rank].kill(number)

    def wait_for_survivors(self) -> None:
        for rank, child in enumerate(self.children):
            assert child.wait(HANGS_S), f"rank {rank} is not a victim, and does not end"

    def end(self) -> dict[int, int]:
        """End what is left; the exit codes by rank."""
        children, self.children = self.children, []
        for child in children:
            child.kill()
            child.wait(HANGS_S)
        return {rank: self.nursery.reap(child) for rank, child in enumerate(children)}

    def told(self, what: str) -> list[Any]:
        return [line[what] for log in sorted(self.logs.iterdir()) for line in told(log) if what in line]


@pytest.fixture(params=["s3", "file"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def scene(kind: str, crash_seed: int, cloud: Cloud, tmp_path: Path) -> Iterator[Scene]:
    plan = plan_of(kind, crash_seed)
    print(plan)  # shown where it fails
    logs = tmp_path / "logs"
    logs.mkdir()
    if kind == "file":
        folder = str(tmp_path / "run")
        scene = Scene(plan, open_storage(folder), cloud.nursery, folder, logs, None)
        begin_job(scene)
        yield scene
        scene.end()
        return
    folder = f"seed-{plan.seed}"
    scene = Scene(plan, cloud.clients.storage(folder, plan.large), cloud.nursery, folder, logs, cloud.wire)
    with cloud.failing(plan.seed) as proxy:
        begin_job(scene)
        proxy.meet_at_random(SHARE_OF_FAULTS, FAULTS, plan.seed)
        yield scene
        scene.end()
        COUNTS.faults += len(proxy.struck)
    cloud.empty()


def begin_job(scene: Scene) -> None:
    owner = lease.acquire(scene.storage, LeaseHolder.this_process("job", SYSTEM_CLOCK), SYSTEM_CLOCK)
    assert owner == FIRST_OWNER
    if scene.plan.act != "write":
        assert all(scene.write(step, variant=1, ranks=2, owner=owner) for step in (1, 2))


def test_whoever_dies_whenever_what_is_listed_restores(scene: Scene) -> None:
    plan = scene.plan
    scene.start()
    scene.wait_for_the_crash()
    if plan.survivors == "die":
        scene.wait_a_moment()  # they go on for a while
        scene.signal_survivors(signal.SIGKILL)
        scene.wait_for_survivors()
    elif plan.survivors == "stand still":
        scene.signal_survivors(signal.SIGSTOP)
    count(scene)
    assert_nothing_torn_or_missing(scene)
    step = next_job(scene)
    scene.signal_survivors(signal.SIGCONT)
    scene.wait_for_survivors()
    assert_nothing_torn_or_missing(scene)
    assert steps(scene.storage)[0] == step
    if plan.take_over:
        assert restore(scene.storage, step).plain["variant"] == NEXT_VARIANT
    assert_ended_as_planned(scene)


def next_job(scene: Scene) -> int:
    """Go on where the job was, as another run or as another world of the same; the step of its first checkpoint."""
    plan, storage, owner = scene.plan, scene.storage, FIRST_OWNER
    if plan.take_over:
        owner = lease.acquire(storage, LeaseHolder.this_process("next", SYSTEM_CLOCK), SYSTEM_CLOCK, take_over=True)
        assert owner > FIRST_OWNER
    found = restore_newest(storage, nothing_damaged)
    if found is not None:
        assert_is_what_was_written(found, plan.large)
    first = found.step + 1 if found else 1
    for step in range(first, first + ATTEMPTS):
        if scene.write(step, NEXT_VARIANT, plan.next_ranks, owner):
            return step
    raise AssertionError(f"the next job could not write a checkpoint: {scene.told('reason')}")


def assert_nothing_torn_or_missing(scene: Scene) -> None:
    """Also while a job writes: then what is older than what it keeps may vanish meanwhile."""
    written = scene.told("written")
    listed = steps(scene.storage)
    for step in written:
        newer = [one for one in listed if one > step]
        assert step in listed or len(newer) >= KEEP, f"step {step} was reported as written; listed are {listed}"
    for step in listed:
        try:
            assert_is_what_was_written(restore(scene.storage, step), scene.plan.large)
        except ObjectMissingError:
            assert step not in steps(scene.storage), "gone although still listed"


def assert_ended_as_planned(scene: Scene) -> None:
    expected = {0, -signal.SIGKILL}
    if isinstance(scene.plan.moment, AtFileByte):
        expected.add(-signal.SIGXFSZ)
    codes = scene.end()
    assert set(codes.values()) <= expected, "\n".join([str(codes), *scene.told("error")])


def nothing_damaged(event: Event) -> None:
    raise AssertionError(event)


def count(scene: Scene) -> None:
    listed = set(steps(scene.storage))
    COUNTS.seeds += 1
    COUNTS.reported += len(scene.told("written"))
    COUNTS.half_written += (
        not {object_keys.step_of(entry.key) for entry in scene.storage.list(object_keys.ROOT)} <= listed
    )


def test_most_of_them_died_in_the_middle_of_something() -> None:
    """Of the seeds that ran in this process; with few of them it says nothing."""
    print(COUNTS)
    assert COUNTS.struck >= COUNTS.seeds // 2 - 2
    assert COUNTS.half_written >= COUNTS.seeds // 10 - 2


@dataclass(frozen=True)
class Failing:
    """A storage that fails for good in some requests, for one rank."""

    fault: Fault
    method: str = ""
    holding: str = ""
    rank: int = 0
    ranks: int = 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}, {self.fault}, {self.method or 'all'} {self.holding}"


FOR_EVER = [
    *(Failing(fault) for fault in (Refuse(), *STALLS)),
    *(Failing(fault, rank=1, ranks=2) for fault in (Refuse(), STALLS[0], STALLS[2])),
    *(
        Failing(STALLS[0], method, holding)
        for method, holding in (
            ("PUT", "partNumber=2"),
            ("POST", "?uploadId"),
            ("PUT", "manifest"),
            ("GET", "checkpoints"),
            ("GET", "owners"),
        )
    ),
    Failing(STALLS[2], "PUT", "manifest"),
    Failing(STALLS[0], "PUT", "parts/", rank=1, ranks=2),
]


def test_a_failed_upload_is_reported_within_a_minute(
    aws: AwsServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """With the times that jobs have, whatever the storage fails in for ever."""
    if request.config.getoption("--crash-seeds", default=0) < 1000:
        pytest.skip("takes most of a minute; run with --crash-seeds 1000")
    for variable, value in aws.environment.items():
        monkeypatch.setenv(variable, value)
    bucket = aws.new_bucket()
    state = snapshot_of(step=1, variant=1, large=True)
    with ExitStack() as stack:
        writers = {}
        for case in FOR_EVER:
            proxy = stack.enter_context(FaultyProxy(aws.url))
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            storage = S3Storage(bucket, str(len(writers)), Cut(part_bytes=5 * MIB))
            proxy.meet(case.fault, case.method, case.holding, times=None)
            writers[case] = CheckpointWriter(storage)
        begun_s = time.monotonic()
        for case, writer in writers.items():
            writer.begin(state, case.rank, case.ranks, "a", FIRST_OWNER)
        seconds: dict[Failing, float] = {}
        pause = threading.Event()
        while len(seconds) < len(writers) and time.monotonic() - begun_s < HANGS_S:
            pause.wait(0.1)
            for case, writer in writers.items():
                for event in writer.poll():
                    assert isinstance(event, CheckpointFailed), (case, event)
                    seconds[case] = time.monotonic() - begun_s
        for writer in writers.values():
            writer.abandon()
    print(*(f"{duration_s:5.1f} s: {case}" for case, duration_s in seconds.items()), sep="\n")
    assert [str(case) for case in writers if case not in seconds] == []
    assert max(seconds.values()) < REPORTED_WITHIN_S

"""A job that keeps few checkpoints, in a storage that damages what is written from some moment on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from faults import crash
from faulty_proxy import Before, FaultyProxy
from harness import Job
from invariants import check
from servers import AwsServer
from training import Training


def _damage_all_but_the_first(client: Any, bucket: str) -> Callable[[str], None]:
    """Flip one bit of each shard just before the manifest of its checkpoint is written, but for the first one."""
    first: list[str] = []

    def act(path: str) -> None:
        folder = path.partition(f"/{bucket}/")[2].rpartition("/")[0] + "/"
        first[:] = first or [folder]
        if folder == first[0]:
            return
        for found in client.list_objects_v2(Bucket=bucket, Prefix=folder)["Contents"]:
            if found["Key"].endswith(".safetensors"):
                body = bytearray(client.get_object(Bucket=bucket, Key=found["Key"])["Body"].read())
                body[-1] ^= 1
                client.put_object(Bucket=bucket, Key=found["Key"], Body=bytes(body))

    return act


@pytest.mark.parametrize("keep", ["1", "2"])
def test_a_job_does_not_give_its_last_whole_checkpoint_for_damaged_ones(run_job, alone, keep):
    """A run that fails after some damaged ones goes on from the whole one."""
    training = Training(checkpoint_every="4 steps", epochs=6, pause_s=0.2)
    with AwsServer() as server, FaultyProxy(server.url) as proxy:
        bucket = server.new_bucket()
        damage = _damage_all_but_the_first(server.client("s3"), bucket)
        proxy.meet(Before(damage), "PUT", holding="manifest", times=None)
        environment = {
            **server.environment, "AWS_ENDPOINT_URL": proxy.url,
            "EDL_HVD_CHECKPOINT": f"s3://{bucket}/run", "EDL_HVD_KEEP_NEWEST": keep,
        }  # fmt: skip
        job = Job(hosts=("localhost:1",), training=training, launcher="edlrun", environment=environment)
        first = run_job(replace(job, faults=(crash(step=33),), flags=("--reset-limit", "0")), "first")
        written = [event["step"] for event in first.events if event["event"] == "checkpoint"]
        assert len(written) > int(keep), first.output
        second = run_job(job, "second")
        check(job, second, alone(training))
    [restored] = [event["step"] for event in second.events if event["event"] == "restore"]
    assert restored == written[0]

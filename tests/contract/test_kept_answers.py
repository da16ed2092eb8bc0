"""Answers of teachers that are kept in a bucket, on a server that speaks S3."""

from __future__ import annotations

import logging

import pytest
import torch
from fleet import Images, Sums, sums
from servers import AwsServer
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd.distill import DistillLoader, Teachers

CHECKS = 6  # five of the same input, and one beside other samples


class Counted(Sums):
    """A teacher that says which model it is, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__(print_as="sums-1")
        self.calls = 0

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().__call__(images)


@pytest.fixture
def server(monkeypatch):
    """A server of its own, because it is stopped."""
    with AwsServer() as aws:
        for name, value in aws.environment.items():
            monkeypatch.setenv(name, value)
        yield aws


def learn(url: str, model: Counted, micro_batch: int = 4) -> int:
    """An epoch of a job of its own; returns how often its teacher was asked."""
    batches = edl_hvd.ElasticBatchSampler(64, global_batch=8, micro_batch=micro_batch, seed=3)
    inner = DataLoader(Images(64), batch_sampler=batches)
    loader = DistillLoader(inner, Teachers(local=lambda: model), send=lambda batch: batch[0], keep=url, views=1)
    before, seen = model.calls, []
    for images, index, answer in loader:
        assert torch.equal(answer, sums(images))
        seen += index.tolist()
    loader.close()
    assert sorted(seen) == list(range(64))
    return model.calls - before


def objects(server: AwsServer, bucket: str) -> list[str]:
    found = server.client("s3").list_objects_v2(Bucket=bucket).get("Contents", [])
    return [entry["Key"] for entry in found]


def test_a_second_job_finds_in_a_bucket_what_the_first_has_got(server):
    bucket, model = server.new_bucket(), Counted()
    url = f"s3://{bucket}/answers"
    assert [learn(url, model), learn(url, model), learn(url, model, micro_batch=8)] == [16 + CHECKS, 0, 0]
    assert objects(server, bucket)


def test_an_object_that_is_damaged_counts_as_not_there(server, caplog):
    bucket, model = server.new_bucket(), Counted()
    url, s3 = f"s3://{bucket}/answers", server.client("s3")
    learn(url, model)
    for key in objects(server, bucket):
        whole = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
        s3.put_object(Bucket=bucket, Key=key, Body=whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING):
        assert learn(url, model) == 16 + CHECKS
    assert "are left out" in caplog.text
    assert learn(url, model) == 0, "what was damaged has been kept anew"


def test_a_server_that_is_away_costs_no_training_and_its_answers_are_found_again(server, caplog, monkeypatch):
    # So that boto3 gives up at once; how it tries again is tested with the storage.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    bucket, model = server.new_bucket(), Counted()
    url = f"s3://{bucket}/answers"
    learn(url, model)
    server.stop()
    with caplog.at_level(logging.WARNING):
        assert learn(url, model) == 16 + CHECKS
    assert "kept answers cannot be read, and teachers are asked instead" in caplog.text
    server.start()
    assert learn(url, model) == 0

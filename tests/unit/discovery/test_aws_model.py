"""The small description of AWS says what botocore's says, as far as it goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from botocore.loaders import Loader

from edl_hvd.discovery.sources.aws_model import MODELS


def differences(small: Any, whole: Any, name: str, whole_name: str, path: str) -> Iterator[str]:
    """Where the shape ``name`` of one model is not in that of the other."""
    ours, theirs = small["shapes"][name], whole["shapes"][whole_name]
    if ours["type"] != theirs["type"]:
        yield f"{path} is {theirs['type']}, not {ours['type']}"
    elif ours["type"] == "list":
        yield from differences(small, whole, ours["member"]["shape"], theirs["member"]["shape"], f"{path}[]")
    elif ours["type"] == "structure":
        for member, reference in ours["members"].items():
            there = theirs["members"].get(member)
            if there is None:
                yield f"{path}.{member} does not exist"
                continue
            if reference["locationName"] != there.get("locationName", member) and not is_capitalised(reference, there):
                yield f"{path}.{member} is called {there.get('locationName')}, not {reference['locationName']}"
            yield from differences(small, whole, reference["shape"], there["shape"], f"{path}.{member}")


def is_capitalised(ours: dict[str, str], theirs: dict[str, str]) -> bool:
    """In a question to EC2 a name begins with a capital letter, whatever its ``locationName`` says."""
    name = theirs.get("queryName") or theirs.get("locationName", "")
    return ours["locationName"] == name[:1].upper() + name[1:]


@pytest.mark.parametrize("service", MODELS)
def test_everything_that_is_described_is_so(service: str) -> None:
    small = MODELS[service]()
    whole = Loader().load_data(f"{service}/{small['metadata']['apiVersion']}/service-2")
    found: list[str] = []
    for name, operation in small["operations"].items():
        theirs = whole["operations"][name]
        assert operation["http"] == theirs["http"]
        assert operation["output"].get("resultWrapper") == theirs["output"].get("resultWrapper")
        for side in ("input", "output"):
            found += differences(small, whole, operation[side]["shape"], theirs[side]["shape"], f"{name} {side}")
    assert found == []
    assert {key: whole["metadata"][key] for key in small["metadata"]} == small["metadata"]


def test_a_difference_is_noticed() -> None:
    small, whole = MODELS["ec2"](), MODELS["ec2"]()
    members = whole["shapes"]["DescribeInstancesAnswer"]["members"]
    members["NextToken"] = {**members["NextToken"], "locationName": "token"}
    del whole["shapes"]["DescribeInstancesQuestion"]["members"]["Filters"]
    names = ("DescribeInstancesQuestion", "DescribeInstancesAnswer")
    assert [told for name in names for told in differences(small, whole, name, name, name)] == [
        "DescribeInstancesQuestion.Filters does not exist",
        "DescribeInstancesAnswer.NextToken is called token, not nextToken",
    ]

"""The operations and fields of AWS that this package uses, as a service model of botocore.

botocore's own model of EC2 has about 750 operations: loading it takes 0.2 s and 26 MiB in each process, and every
field of every instance is then parsed at every request. ``tests/unit/discovery/test_aws_model.py``
compares these with botocore's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Tree = Any
# A type's name; {"Member" or "Member=name on the wire": Tree}; or [Tree], a list.

_EC2_FILTERS: Tree = [{"Name": "string", "Values=Value": ["string"]}]
_EC2_PAGE: dict[str, Tree] = {"Filters=Filter": _EC2_FILTERS, "MaxResults": "integer", "NextToken": "string"}

_EC2: dict[str, tuple[Tree, Tree]] = {
    "DescribeInstances": (
        {**_EC2_PAGE, "DryRun": "boolean"},
        {
            "NextToken": "string",
            "Reservations=reservationSet": [
                {
                    "Instances=instancesSet": [
                        {
                            "InstanceId": "string",
                            "InstanceType": "string",
                            "InstanceLifecycle": "string",
                            "LaunchTime": "timestamp",
                            "Placement": {"AvailabilityZone": "string"},
                            "PrivateIpAddress": "string",
                            "PrivateDnsName": "string",
                            "State=instanceState": {"Name": "string"},
                        }
                    ]
                }
            ],
        },
    ),
    "DescribeInstanceTypes": (
        {**_EC2_PAGE, "DryRun": "boolean"},
        {
            "NextToken": "string",
            "InstanceTypes=instanceTypeSet": [{"InstanceType": "string", "GpuInfo": {"Gpus": [{"Count": "integer"}]}}],
        },
    ),
    "DescribeSpotInstanceRequests": (
        {**_EC2_PAGE, "DryRun": "boolean"},
        {
            "NextToken": "string",
            "SpotInstanceRequests=spotInstanceRequestSet": [
                {"InstanceId": "string", "Status": {"Code": "string", "UpdateTime": "timestamp"}}
            ],
        },
    ),
    "DescribeInstanceStatus": (
        {**_EC2_PAGE, "DryRun": "boolean"},
        {
            "NextToken": "string",
            "InstanceStatuses=instanceStatusSet": [
                {
                    "InstanceId": "string",
                    "InstanceStatus": {"Status": "string"},
                    "SystemStatus": {"Status": "string"},
                }
            ],
        },
    ),
    "DescribeSpotPriceHistory": (
        {
            "InstanceTypes=InstanceType": ["string"],
            "ProductDescriptions=ProductDescription": ["string"],
            "StartTime": "timestamp",
            "MaxResults": "integer",
            "NextToken": "string",
            "DryRun": "boolean",
        },
        {
            "NextToken": "string",
            "SpotPriceHistory=spotPriceHistorySet": [
                {
                    "AvailabilityZone": "string",
                    "InstanceType": "string",
                    "SpotPrice": "string",
                    "Timestamp": "timestamp",
                }
            ],
        },
    ),
}

_AUTO_SCALING: dict[str, tuple[Tree, Tree]] = {
    "DescribeAutoScalingGroups": (
        {"AutoScalingGroupNames": ["string"], "MaxRecords": "integer", "NextToken": "string"},
        {
            "NextToken": "string",
            "AutoScalingGroups": [
                {
                    "AutoScalingGroupName": "string",
                    "Instances": [{"InstanceId": "string", "LifecycleState": "string", "HealthStatus": "string"}],
                }
            ],
        },
    ),
}


class _Shapes:
    """Trees, taken apart into shapes with names."""

    def __init__(self, on_the_wire: Callable[[str], str]) -> None:
        self._on_the_wire = on_the_wire
        self.shapes: dict[str, dict[str, Any]] = {}

    def add(self, name: str, tree: Tree) -> dict[str, str]:
        """A reference to the shape of ``tree``, which becomes known by ``name``."""
        if isinstance(tree, str):
            self.shapes[tree] = {"type": tree}
            return {"shape": tree}
        if isinstance(tree, list):
            self.shapes[name] = {"type": "list", "member": self.add(f"{name}Member", tree[0])}
        else:
            self.shapes[name] = {"type": "structure", "members": dict(self._members(name, tree))}
        return {"shape": name}

    def _members(self, name: str, tree: Mapping[str, Tree]) -> list[tuple[str, dict[str, str]]]:
        members = []
        for key, part in tree.items():
            member, _, location = key.partition("=")
            reference = self.add(f"{name}{member}", part)
            members.append((member, {**reference, "locationName": location or self._on_the_wire(member)}))
        return members


def _describe(metadata: dict[str, Any], tree: dict[str, tuple[Tree, Tree]], is_ec2: bool) -> dict[str, Any]:
    """A service as botocore wants it described."""

    def in_an_answer(member: str) -> str:
        return member[0].lower() + member[1:] if is_ec2 else member

    questions, answers = _Shapes(str), _Shapes(in_an_answer)
    operations = {}
    for name, (request, answer) in tree.items():
        output = answers.add(f"{name}Answer", answer)
        if not is_ec2:
            output["resultWrapper"] = f"{name}Result"
        operations[name] = {
            "name": name,
            "http": {"method": "POST", "requestUri": "/"},
            "input": questions.add(f"{name}Question", request),
            "output": output,
        }
    common = {"signatureVersion": "v4", "auth": ["aws.auth#sigv4"]}
    return {
        "version": "2.0",
        "metadata": {**metadata, **common},
        "operations": operations,
        "shapes": {**questions.shapes, **answers.shapes},
    }


def describe_ec2() -> dict[str, Any]:
    """EC2, version 2016-11-15, which has not changed its name since; new fields are added to it."""
    metadata = {
        "apiVersion": "2016-11-15",
        "endpointPrefix": "ec2",
        "protocol": "ec2",
        "protocols": ["ec2"],
        "serviceFullName": "Amazon Elastic Compute Cloud",
        "serviceId": "EC2",
        "uid": "ec2-2016-11-15",
        "xmlNamespace": "http://ec2.amazonaws.com/doc/2016-11-15",
    }
    return _describe(metadata, _EC2, is_ec2=True)


def describe_auto_scaling() -> dict[str, Any]:
    """Auto Scaling, version 2011-01-01, the only one there is."""
    metadata = {
        "apiVersion": "2011-01-01",
        "endpointPrefix": "autoscaling",
        "protocol": "query",
        "protocols": ["query"],
        "serviceFullName": "Auto Scaling",
        "serviceId": "Auto Scaling",
        "uid": "autoscaling-2011-01-01",
        "xmlNamespace": "http://autoscaling.amazonaws.com/doc/2011-01-01/",
    }
    return _describe(metadata, _AUTO_SCALING, is_ec2=False)


MODELS: dict[str, Callable[[], dict[str, Any]]] = {"ec2": describe_ec2, "autoscaling": describe_auto_scaling}

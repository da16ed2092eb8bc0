"""A worker that prints the time slices of all its threads, and of its driver's, after a collective."""

import json
import os
import sys

import torch

import edl_hvd

edl_hvd.init()
torch.set_num_threads(1)
sys.path.insert(0, os.environ["SUPPORT"])
from time_slices import slices_of_process  # noqa: E402


@edl_hvd.elastic
def train(state: edl_hvd.State) -> None:
    edl_hvd.allreduce(torch.ones(3), op="sum")
    print(json.dumps({"worker": slices_of_process(os.getpid()), "driver": slices_of_process(os.getppid())}))


train(edl_hvd.State())

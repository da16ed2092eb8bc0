"""A worker that prints a line, waits until a pipe is opened for writing, prints more, and ends.

Its argument is the path of the pipe.
"""

import sys

import torch

import edl_hvd

edl_hvd.init()
torch.set_num_threads(1)


@edl_hvd.elastic
def train(state: edl_hvd.State) -> None:
    print("line 0")
    with open(sys.argv[1]):
        pass
    for number in range(1, 100):
        print(f"line {number}")


train(edl_hvd.State())

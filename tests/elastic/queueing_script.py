"""One of two ranks: rank 1 hands tensors to Horovod without a pause until that fails, rank 0 waits for its end.

Whenever rank 1 holds Python's lock it keeps it, as a backward pass with many small parameters does by chance.
"""

import sys
import time

import horovod.torch as hvd
import torch

from edl_hvd.errors import WorldBrokenError
from edl_hvd.worker.engine.horovod_collectives import HorovodCollectives

ENOUGH_IN_THE_QUEUE = 50

torch.set_num_threads(1)
hvd.init()
collectives = HorovodCollectives()
queued = 0
while hvd.rank() == 0:
    time.sleep(1)
sys.setswitchinterval(3600)
try:
    while True:
        gradient = torch.ones(8, 3, 3, 3).to(memory_format=torch.channels_last)
        collectives.start_sum(gradient, f"gradient {queued}", 0.5)
        queued += 1
        if queued == ENOUGH_IN_THE_QUEUE:
            print("queued", flush=True)
except WorldBrokenError:
    print("noticed", flush=True)
hvd.shutdown()

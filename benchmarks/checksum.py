"""How fast one core takes a checkpoint's checksums, beside other hashes, and whether training can go on meanwhile.

    python benchmarks/checksum.py [--size-mb 1000] [--turns 7]

Each hash goes over the same memory, which is larger than the processor's caches, in the chunks that a checkpoint has;
in turn, medians. The last column is by how much Python in another thread is slower meanwhile, where both threads have a
core of their own: 1.0 if the hash lets go of Python's lock.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import threading
import time
import zlib
from collections.abc import Callable

import xxhash

from edl_hvd.checkpoint.format.checksum import CHUNK_BYTES, checksum, chunks

Hash = Callable[[memoryview], object]

HASHES: dict[str, Hash] = {
    "edl_hvd (XXH3, 128 bits)": checksum,
    "XXH3, 64 bits": xxhash.xxh3_64_digest,
    "CRC-32 (zlib)": zlib.crc32,
    "SHA-256": lambda data: hashlib.sha256(data).digest(),
    "BLAKE2b": lambda data: hashlib.blake2b(data).digest(),
}
COUNT = 200_000
# Additions of Python's, some milliseconds.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=1000, help="memory that each goes over (default 1000)")
    parser.add_argument("--turns", type=int, default=7, help="of each hash (default 7)")
    arguments = parser.parse_args()
    memory = memoryview(os.urandom(1_000_000) * arguments.size_mb)
    rates: dict[str, list[float]] = {name: [] for name in HASHES}
    for turn in range(arguments.turns + 1):
        for name, take in HASHES.items():
            used_s = time.thread_time()
            go_over(memory, take)
            used_s = time.thread_time() - used_s
            if turn:  # the first finds the memory
                rates[name].append(memory.nbytes / used_s / 1e9)
    own = statistics.median(rates["edl_hvd (XXH3, 128 bits)"])
    print(f"{'':<26}{'GB/s of a core':>15}{'edl_hvd is':>13}{'Python meanwhile':>19}")
    for name, take in HASHES.items():
        rate = statistics.median(rates[name])
        slower = f"{slowdown(memory, take):.1f} x as long" if len(os.sched_getaffinity(0)) > 1 else "one core"
        print(f"{name:<26}{rate:>15.2f}{f'{own / rate:.1f} x':>13}{slower:>19}", flush=True)


def go_over(memory: memoryview, take: Hash) -> None:
    for start, stop in chunks(memory.nbytes, CHUNK_BYTES):
        take(memory[start:stop])


def slowdown(memory: memoryview, take: Hash) -> float:
    """How many times as long Python takes while another thread takes checksums."""
    alone_s = statistics.median(counting_s() for _ in range(9))
    over = threading.Event()

    def meanwhile() -> None:
        while not over.is_set():
            go_over(memory[: 4 * CHUNK_BYTES], take)

    thread = threading.Thread(target=meanwhile)
    thread.start()
    beside_s = statistics.median(counting_s() for _ in range(9))
    over.set()
    thread.join()
    return beside_s / alone_s


def counting_s() -> float:
    began_s = time.perf_counter()
    for number in range(COUNT):
        number + 1
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()

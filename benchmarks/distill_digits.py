"""What a student gains from a teacher where labels are scarce: digits with 200 labels, over several seeds.

    python benchmarks/distill_digits.py                     10 seeds: about five minutes

Data, networks and numbers are those of the example (``examples/distill``), and what a seed chooses stands in its
``seeds.py``. The last 540 images, which other people wrote, are for testing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

sys.path += [str(Path(__file__).parents[1] / "examples" / "distill")]
from common import CNNS, TEACHER_EPOCHS, TEMPERATURE, TRAINING, Average, accuracy, all_digits, train_cnn
from seeds import answers_of, learn, show

EPOCHS = (30, 90)


def train_teachers(epochs: int, long_epochs: int) -> dict[str, torch.nn.Module]:
    """One CNN, the example's teacher, and one whose CNNs have learned for longer."""
    return {
        "one CNN": train_cnn(0, epochs),
        "three, averaged": Average(train_cnn(seed, epochs) for seed in range(1, CNNS + 1)),
        f"three of {long_epochs} epochs": Average(train_cnn(seed, long_epochs) for seed in range(1, CNNS + 1)),
    }


def main() -> None:
    """Train all students and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--teacher-epochs", type=int, default=TEACHER_EPOCHS, help="of a CNN [%(default)s]")
    parser.add_argument("--long-epochs", type=int, default=40, help="of a CNN that learns for longer [%(default)s]")
    parser.add_argument("--epochs", type=int, nargs=2, default=EPOCHS, help="of the students [30 90]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images, targets = all_digits()
    answers, seeds = {}, range(arguments.seeds)
    for name, model in train_teachers(arguments.teacher_epochs, arguments.long_epochs).items():
        began_s = time.process_time()
        answers[name] = answers_of(model)
        spent_s = time.process_time() - began_s
        share = accuracy(model, images[TRAINING:], targets[TRAINING:])
        print(f"{name}: {share:.2%} of the test images, {1e6 * spent_s / len(images):.0f} µs of processor per answer")
    print("\n| teacher | epochs | temperature | labels alone | with the teacher | gain, points | least | most |")
    print("|---|---|---|---|---|---|---|---|")
    for epochs in arguments.epochs:
        alone = [learn(None, seed, epochs) for seed in seeds]
        for name in answers:
            for temperature in (2.0, TEMPERATURE):
                taught = [learn(answers[name], seed, epochs, temperature) for seed in seeds]
                gains = [with_it - without for with_it, without in zip(taught, alone, strict=True)]
                print(
                    f"| {name} | {epochs} | {temperature:g} | {show(alone)} | {show(taught)} | {show(gains)} "
                    f"| {100 * min(gains):.2f} | {100 * max(gains):.2f} |",
                    flush=True,
                )
    print(f"\n{arguments.seeds} seeds; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()

"""Which samples the workers of a training have written down."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

SAMPLES, BATCH = 1797, 128


def whole_epochs(folder: Path) -> list[bool]:
    """Whether an epoch has each sample once, for each epoch.

    Args:
        folder: Folder of ``train.py --index-log``.
    """
    steps_per_epoch = -(-SAMPLES // BATCH)
    trained: dict[int, Counter[int]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            noted = json.loads(line)
            trained.setdefault(noted["step"] // steps_per_epoch, Counter()).update(noted["indices"])
    return [counts == Counter(range(SAMPLES)) for _, counts in sorted(trained.items())]

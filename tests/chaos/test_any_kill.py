"""Any worker killed at any moment: the job completes and every sample counts once."""

from __future__ import annotations

import random

from faults import AnyFault, RandomKill, add_host, kill
from harness import Job
from invariants import check
from training import Training

# Points where a worker can die, and how often one of the first two workers passes them before the newcomer trains.
PASSES = {
    "rendezvous": 2,
    "forming": 2,
    "sync": 2,
    "broadcast": 6,
    "step": 16,
    "reduced": 8,
    "update": 8,
    "commit": 8,
    "committed": 8,
    "leaving": 1,
    "callback": 1,
}
NEWCOMERS_POINTS = ("start", "rendezvous", "forming", "sync", "broadcast", "callback", "commit", "step")


def chosen_kill(seed: int) -> AnyFault:
    """Even seeds strike from outside at a random time, odd ones from inside at a random point, however short."""
    chance = random.Random(seed)
    if seed % 2 == 0:
        return RandomKill(seed, since=chance.choice(("start", "step", "newcomer")), within_s=2.5)
    if chance.random() < 0.4:
        return kill(worker="127.0.0.1:1", at=chance.choice(NEWCOMERS_POINTS))
    at = chance.choice(sorted(PASSES))
    return kill(worker=chance.choice(("localhost:0", "127.0.0.1:0")), at=at, visit=chance.randint(1, PASSES[at]))


def test_any_worker_killed_at_any_moment(run_either, alone, tmp_path, chaos_seed):
    """Two hosts, one of which gets a second slot on the way; its worker starts, joins and syncs meanwhile.

    Two of four seeds write checkpoints at the same time.
    """
    checkpoint = str(tmp_path / "checkpoints") if chaos_seed % 4 in (1, 2) else None
    training = Training(linger_s=0.5, checkpoint=checkpoint, checkpoint_every="3 steps")
    faults = (add_host("127.0.0.1:2", step=3), chosen_kill(chaos_seed))
    job = Job(faults=faults, training=training, flags=("--blacklist-cooldown-range", "1", "2"))
    outcome = run_either(job)
    check(job, outcome, alone(training))

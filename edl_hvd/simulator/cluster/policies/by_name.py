"""The policies, by the names that the command line takes."""

from __future__ import annotations

from collections.abc import Callable

from edl_hvd.planning.values import PlanRules
from edl_hvd.simulator.cluster.policies.afs import ElasticShareByLength
from edl_hvd.simulator.cluster.policies.families import WithFamilies
from edl_hvd.simulator.cluster.policies.fifo import FirstInFirstOut
from edl_hvd.simulator.cluster.policies.fulfilment import Fulfilment
from edl_hvd.simulator.cluster.policies.max_min import MaxMin
from edl_hvd.simulator.cluster.policies.optimus import Optimus
from edl_hvd.simulator.cluster.policies.ranked import UNDAMPED, RankedShares
from edl_hvd.simulator.cluster.policies.tiresias import Tiresias
from edl_hvd.simulator.cluster.view import Policy

POLICIES: dict[str, Callable[[], Policy]] = {
    "ranked": RankedShares,
    "ranked-blind": lambda: RankedShares(is_known=False, name="ranked-blind"),
    "ranked-families": lambda: WithFamilies(RankedShares()),
    "ranked-blind-families": lambda: WithFamilies(RankedShares(is_known=False, name="ranked-blind")),
    "ranked-undamped": lambda: RankedShares(rules=UNDAMPED, name="ranked-undamped"),
    "ranked-short-first": lambda: RankedShares(rules=PlanRules(favour_short=1.0), name="ranked-short-first"),
    "ranked-doubling": lambda: RankedShares(name="ranked-doubling", doubles=True),
    "fifo": FirstInFirstOut,
    "fifo-backfill": lambda: FirstInFirstOut(has_backfill=True),
    "fulfilment": Fulfilment,
    "tiresias": Tiresias,
    "optimus": Optimus,
    "max-min": MaxMin,
    "max-min-families": lambda: WithFamilies(MaxMin()),
    "afs-l": ElasticShareByLength,
    "afs-l-families": lambda: WithFamilies(ElasticShareByLength()),
}

KNOWS = {
    "ranked": "rest of work",
    "ranked-blind": "nothing",
    "ranked-families": "rest of work, which jobs are alike",
    "ranked-blind-families": "which jobs are alike",
    "ranked-undamped": "rest of work",
    "ranked-short-first": "rest of work",
    "ranked-doubling": "rest of work",
    "fifo": "user's GPUs and batch",
    "fifo-backfill": "user's GPUs and batch",
    "fulfilment": "nothing",
    "tiresias": "user's GPUs and batch",
    "optimus": "rest of work, true step times",
    "max-min": "nothing",
    "max-min-families": "which jobs are alike",
    "afs-l": "rest of work",
    "afs-l-families": "rest of work, which jobs are alike",
}
"""What each policy is told beside what jobs measure; results of policies that know more are not comparable."""

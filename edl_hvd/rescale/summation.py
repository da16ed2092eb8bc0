"""A sum of floating-point terms whose rounding does not depend on who adds what. Pure integers; original here.

Floating-point addition is not associative, so a sum's last bits depend on its order. Here the order is that of one
binary tree over the terms, which their number M alone decides:

    node (l, i) covers the terms i·2**l up to, not including, min((i + 1)·2**l, M)
    value of (0, i) = term i
    value of (l, i) = value of (l - 1, 2i) + value of (l - 1, 2i + 1), or the first alone, if the second covers nothing

and the sum is the value of the node that covers all. Whoever holds some neighbouring terms adds up the whole nodes
among them; whoever gets everybody's nodes adds up the rest. The additions are the same ones, whoever makes them, so the
sum is the same, bit for bit. It is pairwise summation, whose error is bounded by ceil(log2 M)·u·(sum of absolute terms)
to first order, u the unit roundoff; adding one term after the other gives M - 1 in the place of the logarithm (Higham,
Accuracy and Stability of Numerical Algorithms, 2nd ed. 2002, section 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A node of the tree: ``level`` l and ``index`` i, both at least 0."""

    level: int
    index: int


class Summation:
    """Says which of the values at hand are to be added, while they come in from left to right.

    Args:
        terms: M, at least 1.

    Attributes:
        nodes: What has come in and is not added to something yet, from left to right.
    """

    def __init__(self, terms: int) -> None:
        self._terms = terms
        self.nodes: list[Node] = []

    def push(self, node: Node) -> int:
        """Take in the node right of those that are here.

        Returns:
            Number of additions that are due. Each adds the last value to the last but one, and drops the last.

        >>> summation = Summation(6)
        >>> [summation.push(Node(0, term)) for term in range(6)]
        [0, 1, 0, 2, 0, 2]
        >>> summation.nodes
        [Node(level=3, index=0)]
        """
        additions = 0
        while True:
            level, index = node.level, node.index
            if index % 2 and self.nodes and self.nodes[-1] == Node(level, index - 1):
                self.nodes.pop()
                additions += 1
            elif index % 2 or (index + 1) << level < self._terms or 1 << level >= self._terms:
                break  # its sibling is elsewhere, or to come; or it is the root
            node = Node(level + 1, index // 2)
        self.nodes.append(node)
        return additions


def nodes_of(first: int, last: int, terms: int) -> list[Node]:
    """The fewest nodes that cover the terms from ``first`` up to, not including, ``last``, from left to right.

    >>> nodes_of(2, 5, terms=8)
    [Node(level=1, index=1), Node(level=0, index=4)]
    >>> nodes_of(3, 3, terms=8)
    []
    """
    summation = Summation(terms)
    for term in range(first, last):
        summation.push(Node(0, term))
    return summation.nodes


def additions(nodes: Sequence[Node], terms: int) -> list[tuple[int, int]]:
    """How the values of these nodes, which together cover all terms once, become the sum.

    >>> additions([*nodes_of(0, 3, terms=5), *nodes_of(3, 5, terms=5)], terms=5)
    [(1, 2), (0, 1), (0, 3)]

    Returns:
        Pairs (i, j) of places in ``nodes``, in order: add value j to value i. The sum ends up in place 0.
    """
    summation, places, pairs = Summation(terms), list[int](), []
    for place, node in enumerate(nodes):
        places.append(place)
        for _ in range(summation.push(node)):
            right = places.pop()
            pairs.append((places[-1], right))
    return pairs

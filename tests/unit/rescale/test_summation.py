"""Sums in the order of one tree: the same bits for any dealing, and no worse than adding one by one."""

from __future__ import annotations

from fractions import Fraction

import numpy
from hypothesis import given
from hypothesis import strategies as st

from edl_hvd.rescale.partition import partition_range
from edl_hvd.rescale.summation import Node, Summation, additions, nodes_of

TERMS = st.integers(1, 70)


def tree_sum(terms: list[numpy.float32], level: int, index: int) -> numpy.float32 | None:
    """The definition, spelled out."""
    if index << level >= len(terms):
        return None
    if level == 0:
        return terms[index]
    left, right = tree_sum(terms, level - 1, 2 * index), tree_sum(terms, level - 1, 2 * index + 1)
    assert left is not None
    return left if right is None else left + right


def height(count: int) -> int:
    return (count - 1).bit_length()


def dealt_sum(terms: list[numpy.float32], size: int) -> numpy.float32:
    """Each rank adds its share while the terms come in; one adds up what the ranks have."""
    values, nodes = [], []
    for rank in range(size):
        first, last = partition_range(len(terms), rank, size)
        own, adding = [], Summation(len(terms))
        for term in range(first, last):
            own.append(terms[term])
            for _ in range(adding.push(Node(0, term))):
                right = own.pop()
                own[-1] = own[-1] + right
        assert adding.nodes == nodes_of(first, last, len(terms))
        values += own
        nodes += adding.nodes
    for left, right in additions(nodes, len(terms)):
        values[left] = values[left] + values[right]
    return values[0]


FLOATS = st.floats(-(2.0**60), 2.0**60, width=32).map(numpy.float32)


@given(st.lists(FLOATS, min_size=1, max_size=40), st.integers(1, 9))
def test_the_sum_is_that_of_the_tree_whatever_the_world(terms, size):
    expected = tree_sum(terms, height(len(terms)), 0)
    assert dealt_sum(terms, size).tobytes() == expected.tobytes()


@given(TERMS, st.integers(1, 9))
def test_every_term_is_covered_once_by_few_nodes(terms, size):
    covered = []
    for rank in range(size):
        nodes = nodes_of(*partition_range(terms, rank, size), terms)
        assert len(nodes) <= 2 * max(1, height(terms))
        for node in nodes:
            covered += range(node.index << node.level, min((node.index + 1) << node.level, terms))
    assert covered == list(range(terms))


@given(TERMS)
def test_one_worker_ends_with_one_node(terms):
    assert nodes_of(0, terms, terms) == [Node(height(terms), 0)]


@given(st.lists(FLOATS, min_size=1, max_size=64))
def test_the_error_stays_within_the_bound_of_pairwise_summation(terms):
    exact = sum(map(Fraction, map(float, terms)))
    magnitude = sum(abs(Fraction(float(term))) for term in terms)
    roundoff = Fraction(1, 2**24)
    depth = height(len(terms))
    bound = depth * roundoff / (1 - depth * roundoff) * magnitude + depth * Fraction(1, 2**150)
    assert abs(Fraction(float(tree_sum(terms, depth, 0))) - exact) <= bound

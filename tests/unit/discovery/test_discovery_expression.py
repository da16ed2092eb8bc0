"""The text of a combination of sources: what is understood, how it is printed, and where it is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_hvd.discovery.expression import Count, Expression, Leaf, Limit, Prefer, UnionOf, Word, parse_expression
from edl_hvd.errors import UsageError

KINDS = frozenset({"file", "ec2", "url"})

values = st.text(max_size=12) | st.sampled_from(["8", "8 hosts", "file:a", "limit(", "a=b", "a)", '"'])
words = st.builds(Word, st.sampled_from(["", "tag", "page-size"]), values)
leaves = st.builds(Leaf, st.sampled_from(sorted(KINDS)), st.lists(words, min_size=1, max_size=3).map(tuple)).filter(
    lambda leaf: leaf.words != (Word("", ""),)
)
counts = st.builds(Count, st.integers(1, 10**6), st.sampled_from(["slots", "hosts"]))
expressions: st.SearchStrategy[Expression] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(UnionOf, st.lists(inner, min_size=1, max_size=3).map(tuple)),
        st.builds(Limit, inner, counts),
        st.builds(Prefer, inner, counts),
    ),
    max_leaves=4,
)


@given(expressions)
def test_what_is_printed_is_read_again(expression: Expression) -> None:
    assert parse_expression(str(expression), KINDS) == expression


@given(st.text(st.sampled_from('union(limit,file:a"\\= 8)'), max_size=30))
def test_any_text_is_understood_or_refused_with_a_mark(text: str) -> None:
    problem = ">>>"
    try:
        parse_expression(text, KINDS)
    except UsageError as error:
        problem = str(error)
    assert ">>>" in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file:hosts.txt", "file:hosts.txt"),
        ("union(ec2:tag=job=7, file:spare.txt)", "union(ec2:tag=job=7, file:spare.txt)"),
        ("union(ec2:tag=job=7,slots=4,file:spare.txt)", "union(ec2:tag=job=7,slots=4, file:spare.txt)"),
        (" prefer( ec2:tag=a=b , 8 hosts )", "prefer(ec2:tag=a=b, 8 hosts)"),
        ("limit(file:a b.txt, 1 slot)", "limit(file:a b.txt, 1)"),
        ("limit(url:https://h/p?x=1,slots=2, 8)", "limit(url:https://h/p?x=1,slots=2, 8)"),
        ("union(file:hosts (1).txt, file:b)", 'union(file:"hosts (1).txt", file:b)'),
        ('file:"a,b"', 'file:"a,b"'),
        ("limit(limit(union(file:a), 9), 8)", "limit(limit(union(file:a), 9), 8)"),
    ],
)
def test_the_forms_of_the_documents(text: str, expected: str) -> None:
    assert str(parse_expression(text, KINDS)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'>>>': expected a source"),
        ("hosts.txt", "expected e.g. file:hosts.txt, "),
        (
            "union(file:a, fil:b)",
            "at the mark in 'union(file:a, >>>fil:b)': there is no kind 'fil'; the kinds are ec2,",
        ),
        ("unoin(file:a)", "'>>>unoin(file:a)': there is no combination 'unoin'"),
        ("union(file:a", "'union(file:a>>>': expected ',' and another source"),
        ("union(file:a))", "'union(file:a)>>>)': it goes on where it should end"),
        ("limit(file:a)", "'limit(file:a>>>)': limit has no number; expected e.g. limit(SOURCE, 8)"),
        ("limit(file:a, 0)", "'limit(file:a, >>>0)': limit needs a whole number of at least 1"),
        ("prefer(file:a, many)", "prefer has no number"),
        ("limit(file:a, 8 gpus)", "limit has no number"),
        ("limit(8, file:a)", "'limit(>>>8, file:a)': expected a source"),
        ("union(file:)", "'union(>>>file:)': nothing follows 'file:'"),
        ('file:"a', "this quote is not closed"),
        ("limit(" * 30 + "file:a" + ", 1)" * 30, "more than 20 combinations"),
    ],
)
def test_what_is_not_understood_is_marked_in_the_text(text: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_expression(text, KINDS)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)

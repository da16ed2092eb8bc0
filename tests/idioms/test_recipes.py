"""The page of recipes is what the tests make of the idioms."""

from __future__ import annotations

import re

import recipes
from all_idioms import IDIOMS


def test_the_page_is_the_one_that_the_idioms_make():
    assert recipes.PAGE.read_text() == recipes.page(), "write it anew: python tests/idioms/recipes.py"


def test_the_page_shows_nothing_of_the_tests():
    shown = "\n".join(recipes.recipe(script) for idiom in IDIOMS for script in (idiom.plain, idiom.ours))
    assert not re.findall(r".*\bjob\b.*", shown)


def test_no_two_idioms_have_the_same_name():
    names = [idiom.name for idiom in IDIOMS]
    assert sorted(set(names)) == sorted(names)

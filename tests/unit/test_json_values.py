"""Values of plain fields as JSON objects, and back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

import pytest

from edl_hvd.errors import UsageError
from edl_hvd.json_values import TextEnum, as_fields, former_values, read_fields


class Colour(TextEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Wheel:
    colour: Colour
    side: Literal["left", "right"] = field(default="left", metadata=former_values({"port": "left"}))
    other: Colour | None = None


@dataclass(frozen=True)
class Cart:
    wheels: tuple[Wheel, ...]
    colour: Colour = Colour.RED


CART = Cart((Wheel(Colour.BLUE, "right"), Wheel(Colour.RED, other=Colour.BLUE)))


def test_an_enum_is_its_text_in_json_and_in_sentences() -> None:
    wheels = [
        {"colour": "blue", "side": "right", "other": None},
        {"colour": "red", "side": "left", "other": "blue"},
    ]
    assert json.loads(json.dumps(as_fields(CART))) == {"wheels": wheels, "colour": "red"}
    assert f"{Colour.RED} and {Colour.BLUE!s}" == "red and blue"


def test_what_was_written_reads_as_it_was() -> None:
    read = read_fields(Cart, json.loads(json.dumps(as_fields(CART))))
    assert read == CART
    assert read.wheels[0].colour is Colour.BLUE


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"colour": "RED"}, r"Wheel\.colour is 'RED'; expected one of 'red', 'blue'"),
        ({"colour": None}, r"Wheel\.colour is None; expected one of 'red', 'blue'"),
        ({"colour": ["red"]}, r"Wheel\.colour is \['red'\]; expected one of"),
        ({"colour": "red", "other": ""}, r"Wheel\.other is ''; expected one of"),
        ({"colour": "red", "side": "middle"}, r"Wheel\.side is 'middle'; expected one of 'left', 'right'"),
        ({"colour": "red", "side": 7}, r"Wheel\.side is 7; expected one of"),
        ({"colour": "red", "side": []}, r"Wheel\.side is \[\]; expected one of"),
    ],
)
def test_a_word_that_is_none_of_the_known_ones_is_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        read_fields(Wheel, fields)


def test_a_former_value_reads_as_its_present_name() -> None:
    assert read_fields(Wheel, {"colour": "red", "side": "port"}) == Wheel(Colour.RED, "left")

from __future__ import annotations

from itertools import combinations

import pytest

from lightning_hetero.errors import PairingError
from lightning_hetero.pairing.code import NUM_WORDS, WORDS, new_code, read_code


def distance(one: str, other: str) -> int:
    """How many letters to change, add or remove to make one word of another."""
    row: list[int] = [*range(len(other) + 1)]
    for number, letter in enumerate(one, 1):
        last, row = row, [number]
        for place, its in enumerate(other):
            row.append(min(last[place + 1] + 1, row[-1] + 1, last[place] + (letter != its)))
    return row[-1]


def test_the_list_has_enough_words_and_no_two_are_one_slip_apart() -> None:
    assert len(WORDS) == 512
    assert all(word.isascii() and word.islower() and 4 <= len(word) <= 6 for word in WORDS)
    assert [pair for pair in combinations(WORDS, 2) if distance(*pair) < 2] == []


def test_codes_are_random() -> None:
    assert len({new_code() for _ in range(50)}) == 50


def test_a_code_is_read_as_people_type_it() -> None:
    code = new_code()
    words = code.split("-")
    for typed in ([code], words, [code.upper()], [" ".join(words)], [*words[:2], f"-{words[2]}"]):
        assert read_code(typed) == code


@pytest.mark.follows("Copy the code as the worker shows it.")
def test_a_misspelt_word_is_found_before_it_costs_a_try() -> None:
    with pytest.raises(PairingError, match="'oter' is not a word .* Did you mean 'otter'"):
        read_code(["oter-candle-river"])
    assert read_code(["otter-candle-river"]) == "otter-candle-river"


@pytest.mark.follows("give all words that the worker shows.")
@pytest.mark.parametrize("words", [[], ["otter"], ["otter-candle-river-otter"]])
def test_a_code_has_three_words(words: list[str]) -> None:
    with pytest.raises(PairingError, match=f"has {NUM_WORDS} words, and this one has"):
        read_code(words)
    assert read_code(["otter", "candle", "river"])

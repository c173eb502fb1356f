"""Codes of pairing: three words of a list, said by one machine and typed at another one.

A stranger has three tries for one of 512³ codes, a chance of 1 in 45 million. Two words of the list
differ in two letters at least, so a slip of the hand is found before it costs a try.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from ..errors import PairingError, did_you_mean

NUM_WORDS = 3

WORDS = tuple(Path(__file__).with_name("words.txt").read_text(encoding="ascii").split())


def new_code() -> str:
    """A new random code, such as ``otter-candle-river``."""
    return "-".join(secrets.choice(WORDS) for _ in range(NUM_WORDS))


def read_code(words: Sequence[str]) -> str:
    """The code in the words of a command line: in one argument or in three, in any case.

    Raises:
        PairingError: If a word is not of the list, or their number is wrong.
    """
    found = [word for word in re.split(r"[\s-]+", " ".join(words).lower()) if word]
    for word in found:
        if word not in WORDS:
            raise PairingError(
                f"{word!r:.40} is not a word of a code.{did_you_mean(word, *WORDS)} Copy the code "
                "as the worker shows it."
            )
    if len(found) != NUM_WORDS:
        raise PairingError(
            f"A code has {NUM_WORDS} words, and this one has {len(found)}; give all words that "
            "the worker shows."
        )
    return "-".join(found)

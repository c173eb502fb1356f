"""Prints who may send what in which state, as the messages declare it.

python -m tests.protocol.tables
"""

from __future__ import annotations

import sys

from lightning_hetero.protocol import messages as m
from lightning_hetero.protocol.bases import Speaker, State

# What every speaker may send in every state.
ALWAYS = tuple(kind for kind in m.KINDS if len(kind.said) == len(Speaker) * len(State))


def allowed(speaker: Speaker, state: State) -> dict[str, State]:
    """The messages that a speaker may send in a state, with the states that follow."""
    return {
        kind.__name__: kind.said[speaker, state]
        for kind in m.KINDS
        if (speaker, state) in kind.said
    }


def drawn() -> str:
    """The tables, one row for each speaker and state."""
    always = [kind.__name__ for kind in ALWAYS]
    lines = [f"{'anyone':13}{'always':10}{' '.join(always)}"]
    for speaker in Speaker:
        for state in State:
            shown = [
                name if following is state else f"{name}→{following.value}"
                for name, following in allowed(speaker, state).items()
                if name not in always
            ]
            if shown:
                lines.append(f"{speaker.value:13}{state.value:10}{' '.join(shown)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(drawn() + "\n")

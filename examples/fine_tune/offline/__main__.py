"""Make both: python -m examples.fine_tune.offline [FOLDER], by default output/made.

A small Llama reads one half of the documentation of the Python standard library. The instruction
pairs ask about the other half.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .documentation import halve, read_documentation
from .instructions import write_instructions
from .small_model import SmallModel, make_small_model


def main(folder: Path) -> None:
    """Make what the folder lacks."""
    to_read, to_ask_about = halve(read_documentation())
    data, model = folder / "stdlib.jsonl", folder / "small_model"
    if not data.exists():
        print(f"making {data}: pairs from the documentation of {len(to_ask_about):,} things")
        write_instructions(to_ask_about, data)
    if not model.exists():
        print(f"making {model}: a small Llama reads the documentation of {len(to_read):,} others")
        texts = [f"{thing.written}\n{thing.opening}" for thing in to_read]
        make_small_model(texts, model, SmallModel())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "output/made"))

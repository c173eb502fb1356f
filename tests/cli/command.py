"""The command in this process."""

from __future__ import annotations

import pytest

from lightning_hetero import cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """The exit status of the command, or its message."""
    monkeypatch.setattr("sys.argv", ["lightning-hetero", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code

"""What tests share lives in modules that hold no tests."""

from __future__ import annotations

import re
from pathlib import Path

FROM_TESTS = re.compile(r"^\s*(?:from|import) .*\btest_.*$", re.MULTILINE)


def test_nothing_is_imported_from_a_file_of_tests() -> None:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    found = {str(file): FROM_TESTS.findall(file.read_text()) for file in files}
    assert {name: lines for name, lines in found.items() if lines} == {}

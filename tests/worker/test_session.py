"""What the coordinator is told of an error in a session."""

from __future__ import annotations

import pytest
import torch

from lightning_hetero.worker.session import _MOST_TEXT, _failure


@pytest.mark.parametrize(
    ("error", "is_short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes."), True),
        (MemoryError("x" * 2 * _MOST_TEXT), True),
        (RuntimeError("The size of tensor a (7) must match the size of tensor b (10)."), False),
    ],
)
def test_who_is_out_of_memory_is_told_how_to_need_less(error: Exception, is_short: bool) -> None:
    found = _failure(error, where=" (in stage 3)")
    assert len(found.reason) <= _MOST_TEXT
    assert " (in stage 3)" in found.reason
    assert ("`recompute: layers` for this stage; or fewer layers" in found.reason) is is_short

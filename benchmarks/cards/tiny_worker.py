"""A worker that tries dtypes on small products: a device in main memory takes minutes for large."""

from __future__ import annotations

from lightning_hetero.cli import main
from lightning_hetero.devices.device import Accelerator


def try_small_products() -> None:
    """Let this process try dtypes on small products."""
    Accelerator.trial_size = 64


if __name__ == "__main__":
    try_small_products()
    main()

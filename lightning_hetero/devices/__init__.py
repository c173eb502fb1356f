"""Devices: one class per backend, with its memory, copies, random generators and timing."""

# Each backend registers itself when its module is imported.
from . import cpu, cuda, mps, xpu

__all__ = ["cpu", "cuda", "mps", "xpu"]

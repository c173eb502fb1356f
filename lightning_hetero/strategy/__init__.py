"""What Lightning calls: the strategy and its hooks."""

from .strategy import HeteroPipelineStrategy

__all__ = ["HeteroPipelineStrategy"]

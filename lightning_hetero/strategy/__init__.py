"""The strategy and its hooks, as Lightning calls them."""

from .strategy import HeteroPipelineStrategy

__all__ = ["HeteroPipelineStrategy"]

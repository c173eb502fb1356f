"""Decoder layers, their recipes and their weights."""

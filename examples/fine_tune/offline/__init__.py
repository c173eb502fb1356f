"""A small model and data to fine-tune it on, made without a network."""

"""Find the worker with wrong results."""

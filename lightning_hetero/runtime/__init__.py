"""Where it runs: channels, the worker, the coordinator, and local worker processes."""

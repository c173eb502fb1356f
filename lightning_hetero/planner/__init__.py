"""Who gets what: pure functions from a profile to a plan, without workers and torch."""

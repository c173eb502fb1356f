"""The Trainer's side of a run."""

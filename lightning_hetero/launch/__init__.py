"""Start workers and let them join a run: by hand, ssh, SLURM, Ray or on this machine."""

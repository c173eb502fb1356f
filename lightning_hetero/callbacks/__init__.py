"""Lightning callbacks: what is said to the strategy by the Trainer's list of callbacks."""

"""How a step runs. Knows no socket and no Trainer."""

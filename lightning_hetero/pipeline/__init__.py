"""How a step runs, without sockets and without a Trainer."""

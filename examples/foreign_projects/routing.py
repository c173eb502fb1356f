"""Combinatorial problems that are solved by reinforcement learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from project import NUM_STEPS, Project


def train_pomo(options: dict[str, Any], folder: Path) -> None:
    """POMO of RL4CO: a transformer that learns short tours by REINFORCE."""
    import torch
    from rl4co.envs import TSPEnv
    from rl4co.models import POMO
    from rl4co.utils import RL4COTrainer

    # The precision "64-true" of Lightning takes a TensorDict apart.
    torch.set_default_dtype(torch.float64)
    try:
        env = TSPEnv(generator_params={"num_loc": 10})
        model = POMO(
            env,
            policy_kwargs={"embed_dim": 32, "num_encoder_layers": 4, "num_heads": 4},
            batch_size=16,
            train_data_size=16 * NUM_STEPS,
            val_data_size=16,
            test_data_size=16,
        )
        RL4COTrainer(**{**options, "precision": "32-true"}, max_epochs=1).fit(model)
    finally:
        torch.set_default_dtype(torch.float32)


PROJECTS = (
    Project(
        "rl4co",
        "rl4co",
        {"layers": "policy.encoder.net.layers", "micro_batching": "boundary"},
        train_pomo,
    ),
)

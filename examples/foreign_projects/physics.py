"""Fields of physics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from project import NUM_STEPS, Project


def train_pina(options: dict[str, Any], folder: Path) -> None:
    """A surrogate of PINA, which mixes two gates into what each layer returns."""
    import torch
    from pina import Trainer
    from pina.model import ResidualFeedForward
    from pina.problem.zoo import SupervisedProblem
    from pina.solver import SupervisedSolver

    points = torch.rand(16 * NUM_STEPS, 2)
    values = (3 * points).sin().prod(dim=1, keepdim=True)
    model = ResidualFeedForward(2, 1, inner_size=32, n_layers=4)
    solver = SupervisedSolver(SupervisedProblem(points, values), model, use_lt=False)
    Trainer(solver, batch_size=16, shuffle=False, max_epochs=1, **options).train()


PROJECTS = (Project("pina-mathlab", "pina", {"layers": "_pina_models.0.inner_layers"}, train_pina),)

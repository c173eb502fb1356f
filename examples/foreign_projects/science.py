"""Chemistry, biology and physics."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from project import NUM_STEPS, Project


def train_chemprop(options: dict[str, Any], folder: Path) -> None:
    """A message-passing network of Chemprop; the perceptron behind it has the layers."""
    import lightning.pytorch as pl
    import numpy as np
    from chemprop import data, models, nn
    from torch.utils.data import DataLoader

    chance = random.Random(1)
    parts = ["C", "CC", "CO", "CN", "CS", "C(Cl)", "C(=O)", "c1ccccc1C"]
    smiles = ["".join(chance.choices(parts, k=4)) for _ in range(16 * NUM_STEPS)]
    points = [
        data.MoleculeDatapoint.from_smi(each, np.array([float(len(each))])) for each in smiles
    ]
    batches = list(data.build_dataloader(data.MoleculeDataset(points), batch_size=16))
    for batch in batches:
        # Lightning converts no graph to the precision of the Trainer.
        batch.bmg.V, batch.bmg.E = batch.bmg.V.double(), batch.bmg.E.double()
    network = nn.RegressionFFN(hidden_dim=32, n_layers=4)
    model = models.MPNN(nn.BondMessagePassing(d_h=300), nn.MeanAggregation(), network)
    pl.Trainer(**options, max_epochs=1).fit(model, DataLoader(batches, batch_size=None))


def train_scvi(options: dict[str, Any], folder: Path) -> None:
    """A variational autoencoder of scvi-tools for counts of genes in cells."""
    import anndata
    import numpy as np
    import scvi

    counts = np.random.default_rng(1).poisson(2.0, size=(16 * NUM_STEPS, 40))
    cells = anndata.AnnData(counts.astype(np.float32))
    scvi.model.SCVI.setup_anndata(cells)
    scvi.settings.seed = 1
    model = scvi.model.SCVI(
        cells, n_hidden=32, n_layers=4, dropout_rate=0.0, deeply_inject_covariates=False
    )
    model.train(max_epochs=1, train_size=1.0, batch_size=16, **options)


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


def layers_of_scvi(module: Any) -> list[Any]:
    """The layers of the encoder, which calls the parts of each block by itself."""
    blocks = module.module.z_encoder.encoder.fc_layers
    return [layer for block in blocks for layer in block if layer is not None]


PROJECTS = (
    Project("pina-mathlab", "pina", {"layers": "_pina_models.0.inner_layers"}, train_pina),
    Project(
        "chemprop",
        "chemprop",
        # Its batches are graphs.
        {"layers": "predictor.ffn", "micro_batching": "boundary"},
        train_chemprop,
    ),
    Project(
        "scvi-tools",
        "scvi",
        {"layers": layers_of_scvi, "micro_batching": "boundary"},
        train_scvi,
    ),
)

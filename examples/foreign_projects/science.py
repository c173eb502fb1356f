"""Chemistry and biology."""

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


def train_schnet(options: dict[str, Any], folder: Path) -> None:
    """SchNet of SchNetPack, which adds what its layers return to the features of the atoms."""
    import schnetpack as spk
    import torch
    from pytorch_lightning import Trainer
    from torch.utils.data import DataLoader

    network = spk.representation.SchNet(
        n_atom_basis=32,
        n_interactions=4,
        radial_basis=spk.nn.GaussianRBF(n_rbf=16, cutoff=5.0),
        cutoff_fn=spk.nn.CosineCutoff(5.0),
    )
    model = spk.model.NeuralNetworkPotential(
        network,
        input_modules=[spk.atomistic.PairwiseDistances()],
        output_modules=[spk.atomistic.Atomwise(n_in=32, output_key="energy")],
    )
    energy = spk.task.ModelOutput("energy", loss_fn=torch.nn.MSELoss())
    task = spk.task.AtomisticTask(model, [energy], optimizer_args={"lr": 1e-3})
    loader = DataLoader([molecules(8, 5) for _ in range(NUM_STEPS)], batch_size=None)
    Trainer(**options, max_epochs=1).fit(task, loader)


def molecules(count: int, num_atoms: int) -> dict[str, Any]:
    """A batch of SchNetPack: so many molecules, in which all atoms are neighbors."""
    import torch
    from schnetpack import properties

    atoms = torch.arange(num_atoms)
    pairs = torch.cartesian_prod(atoms, atoms)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    molecule = torch.arange(count)
    pairs = (pairs + num_atoms * molecule[:, None, None]).reshape(-1, 2)
    return {
        properties.n_atoms: torch.full((count,), num_atoms),
        properties.Z: torch.randint(1, 9, (count * num_atoms,)),
        properties.R: torch.randn(count * num_atoms, 3),
        properties.idx_m: molecule.repeat_interleave(num_atoms),
        properties.idx_i: pairs[:, 0],
        properties.idx_j: pairs[:, 1],
        properties.offsets: torch.zeros(len(pairs), 3),
        "energy": torch.randn(count),
    }


def layers_of_scvi(module: Any) -> list[Any]:
    """The layers of the encoder, which calls the parts of each block by itself."""
    blocks = module.module.z_encoder.encoder.fc_layers
    return [layer for block in blocks for layer in block if layer is not None]


PROJECTS = (
    Project(
        "chemprop",
        "chemprop",
        # Its batches are graphs.
        {"layers": "predictor.ffn", "micro_batching": "boundary"},
        train_chemprop,
    ),
    Project(
        "schnetpack",
        "schnetpack",
        # The atoms of all molecules are in one dimension, so nothing can be cut.
        {
            "layers": "model.representation.interactions",
            "micro_batching": "boundary",
            "micro_batches": 1,
        },
        train_schnet,
        "pytorch_lightning",
    ),
    Project(
        "scvi-tools",
        "scvi",
        {"layers": layers_of_scvi, "micro_batching": "boundary"},
        train_scvi,
    ),
)

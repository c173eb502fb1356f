"""Images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from project import NUM_STEPS, Project


def train_resnet(options: dict[str, Any], folder: Path) -> None:
    """A classifier of TorchUncertainty, with its own Trainer and metrics."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from torch_uncertainty import TUTrainer
    from torch_uncertainty.models.classification import resnet
    from torch_uncertainty.routines import ClassificationRoutine

    model = resnet(3, 4, arch=20, style="cifar")
    routine = ClassificationRoutine(
        model, 4, torch.nn.CrossEntropyLoss(), optim_recipe=torch.optim.Adam(model.parameters())
    )
    labels = torch.randint(4, (8 * NUM_STEPS,))
    images = torch.randn(len(labels), 3, 16, 16) + labels[:, None, None, None]
    loader = DataLoader(TensorDataset(images, labels), batch_size=8)
    TUTrainer(**options, max_epochs=1).fit(routine, loader)


def layers_of_resnet(module: Any) -> list[Any]:
    """Its residual blocks."""
    model = module.model
    return [*model.layer1, *model.layer2, *model.layer3]


PROJECTS = (
    Project(
        "torch-uncertainty",
        "torch_uncertainty",
        # It normalizes by the batch.
        {"layers": layers_of_resnet, "micro_batching": "boundary"},
        train_resnet,
    ),
)

# ruff: noqa: F401
# mypy: implicit-reexport
"""The one Lightning of this process: all other modules take its classes from here.

Lightning is published under two names with the same code, and the classes of one name are not the
classes of the other. The first import of this module chooses a name for the whole process: the
project's imported name, and `lightning.pytorch` if it has imported both or neither. `import
lightning_hetero.pytorch_lightning` chooses the other name beforehand.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .errors import HeteroError

FIRST_NAME, SECOND_NAME = "lightning.pytorch", "pytorch_lightning"
# A module is in `sys.modules` from the begin of its import on.
_takes_first = f"{__package__}.{SECOND_NAME}" not in sys.modules and (
    FIRST_NAME in sys.modules or SECOND_NAME not in sys.modules
)

if TYPE_CHECKING or _takes_first:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
    from lightning.fabric.utilities.cloud_io import get_filesystem
    from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
    from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        Callback,
        EMAWeightAveraging,
        GradientAccumulationScheduler,
        ModelPruning,
        ProgressBar,
        RichProgressBar,
        StochasticWeightAveraging,
        TQDMProgressBar,
        WeightAveraging,
    )
    from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
    from lightning.pytorch.core.optimizer import (
        LightningOptimizer,
        _init_optimizers_and_lr_schedulers,
        _MockOptimizer,
    )
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors.data_connector import (
        _DataLoaderSource,
        _process_dataloader,
        _resolve_overfit_batches,
    )
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
    from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES, CombinedLoader
    from lightning.pytorch.utilities.data import extract_batch_size
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
else:
    import pytorch_lightning as pl
    from lightning_fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning_fabric.plugins.precision.amp import _optimizer_handles_unscaling
    from lightning_fabric.utilities.cloud_io import get_filesystem
    from lightning_fabric.utilities.data import _set_sampler_epoch, sized_len
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from lightning_fabric.utilities.seed import _collect_rng_states, _set_rng_states
    from pytorch_lightning.accelerators import Accelerator, AcceleratorRegistry
    from pytorch_lightning.callbacks import (
        BaseFinetuning,
        Callback,
        EMAWeightAveraging,
        GradientAccumulationScheduler,
        ModelPruning,
        ProgressBar,
        RichProgressBar,
        StochasticWeightAveraging,
        TQDMProgressBar,
        WeightAveraging,
    )
    from pytorch_lightning.callbacks.progress.tqdm_progress import Tqdm
    from pytorch_lightning.core.optimizer import (
        LightningOptimizer,
        _init_optimizers_and_lr_schedulers,
        _MockOptimizer,
    )
    from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.plugins.io.wrapper import _WrappingCheckpointIO
    from pytorch_lightning.plugins.precision import MixedPrecision, Precision
    from pytorch_lightning.strategies import SingleDeviceStrategy
    from pytorch_lightning.trainer.connectors.data_connector import (
        _DataLoaderSource,
        _process_dataloader,
        _resolve_overfit_batches,
    )
    from pytorch_lightning.trainer.states import RunningStage, TrainerFn, TrainerStatus
    from pytorch_lightning.utilities.combined_loader import _SUPPORTED_MODES, CombinedLoader
    from pytorch_lightning.utilities.data import extract_batch_size
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

# The remedy for projects with the other name.
FOR_OTHER_PROJECTS = (
    f"a project on {SECOND_NAME} imports the strategy and the callbacks from "
    f"{__package__}.{SECOND_NAME}, before it imports anything from {__package__}"
    if TYPE_CHECKING or _takes_first
    else f"a project on {FIRST_NAME} imports Lightning before {__package__}, and imports nothing "
    f"from {__package__}.{SECOND_NAME}"
)


def require(name: str) -> None:
    """Refuse the name of Lightning not chosen by this process.

    Raises:
        HeteroError: With the remedy.
    """
    if pl.__name__ != name:
        raise HeteroError(
            f"{__package__} uses {pl.__name__} in this process, not {name}; {FOR_OTHER_PROJECTS}."
        )

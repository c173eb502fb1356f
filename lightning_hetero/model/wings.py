"""The wings of layers: their adapters, and the comparison of their code on all machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from ..errors import ModelError
from ..optional import has_wing

if TYPE_CHECKING:
    from .adapters import AdapterSwitches
    from .layers import Adapters


def describe_adapters(
    owner: nn.Module, layers: Sequence[nn.Module], around: Sequence[nn.Module] = ()
) -> Adapters | None:
    """Describe the adapters inside a model's layers, if there are any.

    Raises:
        ModelError: If they cannot be injected elsewhere, or are merged into the weights.
    """
    if not _are_of_peft(layers):
        return None
    from . import adapters

    return adapters.describe_adapters(owner, layers, around)


def inject_adapters(model: nn.Module, described: Adapters) -> None:
    """Put adapters without content into a model on ``meta``.

    Raises:
        ModelError: If peft is missing here or cannot inject them.
    """
    from . import adapters

    adapters.inject_adapters(model, described)


def adapter_switches(layer: nn.Module) -> AdapterSwitches | None:
    """Detects changes of a layer's adapters; None without adapters."""
    if not _are_of_peft([layer]):
        return None
    from .adapters import AdapterSwitches

    return AdapterSwitches(layer)


def _are_of_peft(layers: Iterable[nn.Module]) -> bool:
    """Whether layers have modules of PEFT, or of classes made from its own."""
    kinds = {type(module) for layer in layers for module in layer.modules()}
    packages = {base.__module__.partition(".")[0] for kind in kinds for base in kind.__mro__}
    return "peft" in packages


def code_of(layers: Iterable[nn.Module], attention: str | None = None) -> dict[str, str] | None:
    """The digests of `layer_code.code_of`; None, with a warning, without that wing."""
    if not has_wing("model.layer_code"):
        rank_zero_warn(
            "Nothing compares the code of layers here with the code on their workers, or sees "
            "values outside of layers change, since lightning_hetero lacks `model.layer_code`; "
            "install the whole package."
        )
        return None
    from . import layer_code

    return layer_code.code_of(layers, attention)


def check_code(
    layers: Iterable[nn.Module], wanted: Mapping[str, str] | None, attention: str | None = None
) -> None:
    """Refuse layers with other code than the coordinator's, unless its digests are None.

    Raises:
        ModelError: If the code differs, or cannot be compared here.
    """
    if wanted is None:
        return
    if not has_wing("model.layer_code"):
        raise ModelError(
            "The worker's lightning_hetero cannot compare the code of its layers with the "
            "coordinator's, since it lacks `model.layer_code`; install the whole package on the "
            "worker."
        )
    from . import layer_code

    layer_code.check_code(layer_code.code_of(layers, attention), wanted)


def changes_outside(layers: Iterable[nn.Module]) -> Callable[[], str | None]:
    """Finds a changed value outside of layers, among the values read by their code: its place."""
    if not has_wing("model.layer_code"):
        return lambda: None  # `code_of` has warned
    from .layer_code import outer_values_of

    return outer_values_of(layers).changed

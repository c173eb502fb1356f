"""Runs of a LightningModule without side effects, and the needs of such a run.

`no_trace` restores the module and its Trainer. `sample_batch` reads the first training batch
without consuming it. `with_optimizers` builds the optimizers before the run has any.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from .._lightning import (
    CombinedLoader,
    DummyLogger,
    TrainerFn,
    _collect_rng_states,
    _DataLoaderSource,
    _init_optimizers_and_lr_schedulers,
    _MockOptimizer,
    _set_rng_states,
    is_param_in_hook_signature,
    pl,
)
from ..devices.device import device_for
from ..errors import BatchError, HeteroError
from ..model.allowed_imports import ImportedHere
from ..model.attributes import Attributes, contents_kept, restoring_generator
from ..model.outer_state import OuterContent, OuterState
from ..pipeline.bench import median_of_blocks, state_bytes
from ..pipeline.microbatch import batch_size, first_samples
from ..pipeline.optimizer import (
    Group,
    StageOptimizer,
    group_options,
    optimizer_class_name,
    optimizer_defaults,
)
from ..protocol import messages as m
from ..window import Window, Windows, windows


@contextmanager
def no_trace(
    module: pl.LightningModule, without: Iterable[nn.Module], *, is_timed: bool = True
) -> Iterator[Runs]:
    """Inside, a module's own code may run. The end of the block restores it and its Trainer.

    Attributes of the module, of its class, and of objects of the same packages are restored:
    assigned ones, and lists, dicts, sets, tensors and random generators that were changed in place,
    such as a metric's. So is the state of the user's code outside of modules. Other effects of the
    code stay.

    Args:
        module: Attached to its Trainer.
        without: Modules in it that do not run, with all modules inside them.
        is_timed: Whether the runs inside are timed. Otherwise every operation is watched, and
            tensors are copied before they change: parameters too, because a ``training_step`` may
            average them by itself.
    """
    skipped = {inner for outer in without for inner in outer.modules()}
    loose = (inner for _, outer in loose_modules(module) for inner in outer.modules())
    inside = [*module.modules(), *loose]
    modules = [inner for inner in inside if inner not in skipped]
    with ExitStack() as undo:
        trainer, draws = module.trainer, _collect_rng_states()
        undo.callback(_set_rng_states, draws)
        undo.callback(setattr, trainer, "loggers", trainer.loggers)
        undo.enter_context(_other_data(trainer))
        before = Attributes(modules)
        undo.callback(before.restore)
        outside = OuterContent(OuterState(inside))
        undo.callback(outside.restore)
        for parameter in module.parameters():
            undo.callback(setattr, parameter, "grad", parameter.grad)
        own = [p for inner in modules for p in inner.parameters(recurse=False)]
        contents = _CopiesOnWrite([] if is_timed else [*before.tensors, *own])
        undo.enter_context(contents_kept(before.tensors) if is_timed else contents)
        runs = Runs(module, before, outside, contents, draws)
        runs.prepare()
        yield runs


def loose_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a module's plain lists, tuples and dicts, where torch does not see them, with
    the code reading them."""
    seen = {*module.modules()}
    for path, inner in module.named_modules():
        for name, value in vars(inner).items():
            for place, found in _modules_in(value, f"{path}.{name}".strip(".")):
                if found not in seen:
                    seen.update(found.modules())
                    yield place, found


def _modules_in(value: Any, place: str, depth: int = 0) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(value, nn.Module):
        yield place, value
    elif isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_PLACES:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if depth < _DEEPEST:  # a container may hold itself
                yield from _modules_in(item, f"{place}[{key!r}]", depth + 1)


# The generators of Python and numpy, as Lightning names them.
_NOT_TORCH = frozenset({"python", "numpy"})


class Runs:
    """Runs of a module's code inside of `no_trace`.

    Args:
        module: Attached to its Trainer.
        before: The attributes before all runs.
        outside: The state outside of modules before all runs.
        contents: The watched tensors.
        draws: The states of random generators before all runs.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        before: Attributes,
        outside: OuterContent,
        contents: _CopiesOnWrite,
        draws: dict[str, Any],
    ) -> None:
        self._module = module
        self._before = before
        self._outside = outside
        self._contents = contents
        self._draws = draws
        self._logger = _UnwrittenLogger()

    @property
    def has_written(self) -> bool:
        """Whether a run has written to a logger by itself."""
        return self._logger.was_asked

    @property
    def may_have_drawn_elsewhere(self) -> bool:
        """Whether a run may have drawn random numbers from other generators than torch's own."""
        states = {
            name: state for name, state in _collect_rng_states().items() if name in _NOT_TORCH
        }
        before = {name: state for name, state in self._draws.items() if name in _NOT_TORCH}
        return self._before.has_generators or repr(states) != repr(before)

    def prepare(self) -> None:
        """Keep a run from logging, and from finding gradients."""
        trainer = self._module.trainer
        trainer.loggers = [self._logger for _ in trainer.loggers]
        for parameter in self._module.parameters():
            parameter.grad = None
        self._module.log = _drop  # type: ignore[method-assign]

    @contextmanager
    def one(self, *, puts_draws_back: bool = True) -> Iterator[None]:
        """Code without timing runs inside. The end of the block restores the state before all runs,
        at less cost than another `no_trace`.

        Args:
            puts_draws_back: Whether random generators are restored too.
        """
        try:
            yield
        finally:
            self._contents.put_back()
            self._before.restore(with_generators=puts_draws_back)
            self._outside.restore()
            if puts_draws_back:
                _set_rng_states(self._draws)
            self.prepare()

    def has_changed(self, tensor: Tensor) -> bool:
        """Whether an operation has changed the memory of a watched tensor."""
        return self._contents.has_changed(tensor)


class _UnwrittenLogger(DummyLogger):
    """Does not write, but notes whether it was asked to.

    Attributes:
        was_asked: Whether it was.
    """

    was_asked = False

    @property
    @override
    def experiment(self) -> Any:
        self.was_asked = True
        return super().experiment

    @override
    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.was_asked = True

    @override
    def __getattr__(self, name: str) -> Any:
        # Such as `log_image`; the name of a folder does not write.
        self.was_asked |= name.startswith("log_") and not name.endswith("_dir")
        return super().__getattr__(name)


# Longer containers hold data.
_MOST_PLACES = 1000
_DEEPEST = 4
# The operations with this in their names update running statistics, and do not declare it.
_UNDECLARED = "batch_norm"
# It declares a change, but only reports to the allocator which stream uses the memory.
_NO_CHANGE = "record_stream"


class _CopiesOnWrite(TorchDispatchMode):
    """Inside, tensors are copied before an operation changes them. The end of the block restores
    their content.

    Args:
        tensors: The tensors to restore.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        found = (storage for tensor in tensors if (storage := _storage_of(tensor)) is not None)
        self._storages = {storage.data_ptr(): storage for storage in found}
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._changed: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _UNDECLARED in function.__name__:
            for item in tree_iter(args):
                self._keep(item)
        elif function._schema.is_mutable and _NO_CHANGE not in function.__name__:
            self._keep_written(function._schema.arguments, args, kwargs or {})
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.put_back()

    def put_back(self) -> None:
        """Restore the content of all tensors."""
        # While this mode is on, it sees the copies here too, and knows their tensors as kept.
        for address, content in self._copies.items():
            if self._has_other_content(address):
                self._changed.add(address)
                self._storages[address].copy_(content)
        self._copies.clear()

    def has_changed(self, tensor: Tensor) -> bool:
        """Whether an operation has changed the content of a tensor's memory: an operation may write
        the same content again, as a parametrization of torch does."""
        storage = _storage_of(tensor)
        address = 0 if storage is None else storage.data_ptr()
        return address in self._changed or self._has_other_content(address)

    def _has_other_content(self, address: int) -> bool:
        if address not in self._copies:
            return False
        found, content = map(_bytes_of, (self._storages[address], self._copies[address]))
        return not torch.equal(found, content)

    def _keep_written(
        self, arguments: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        for place, argument in enumerate(arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for item in tree_iter(value):
                    self._keep(item)

    def _keep(self, item: Any) -> None:
        storage = _storage_of(item) if isinstance(item, Tensor) else None
        address = 0 if storage is None else storage.data_ptr()
        if address in self._storages and address not in self._copies:
            self._copies[address] = self._storages[address].clone()


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor, if it has some."""
    has_memory = tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
    return tensor.untyped_storage() if has_memory else None


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _drop(*_args: Any, **_kwargs: Any) -> None:
    """Stands in for ``LightningModule.log``."""


class NoSample(HeteroError):
    """A training batch to measure with is missing; the text says why."""


@dataclass(frozen=True)
class SampleBatch:
    """A training batch before its transfer to the device.

    Args:
        batch: As the data loader gave it.
        of_several_loaders: Whether it is a list of batches, one of each loader.
        size: Its samples; None if it cannot be cut.
        window: How many such batches are pieces of one training batch.
    """

    batch: Any
    of_several_loaders: bool
    size: int | None
    window: int = 1

    def first(self, count: int) -> Any:
        """A micro-batch of its first samples."""
        if self.size is None:
            return self.batch
        return first_samples(self.batch, count, self.of_several_loaders)

    @property
    def form(self) -> str:
        """The shapes of its tensors, as text."""
        found: list[str] = []

        def note(tensor: Tensor) -> Tensor:
            found.append(f"{'x'.join(map(str, tensor.shape))} {str(tensor.dtype)[6:]}")
            return tensor

        apply_to_collection(self.batch, Tensor, note)
        return ", ".join(found)


def sample_batch(trainer: pl.Trainer) -> SampleBatch:
    """The first batch of the training data. The run gets it again, because its loaders, its
    generators and its workers are left as they are.

    Raises:
        NoSample: Without a batch, or if the run would not get it again.
    """
    module = trainer.lightning_module
    if trainer.state.fn != TrainerFn.FITTING:
        raise NoSample(f"There is no training in `trainer.{trainer.state.fn}`.")
    if not module.automatic_optimization:
        raise NoSample("The `training_step` steps the optimizer by itself.")
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise NoSample("The `training_step` takes a `dataloader_iter`.")
    source = trainer.fit_loop._data_source
    if trainer.limit_train_batches == 0 or source.instance is None or not source.is_defined():
        raise NoSample("There is no train_dataloader.")
    loaders = source.dataloader()
    batch, window = _first_batch(loaders), 1
    if isinstance(batch, Window):
        # A choice that fits with the largest piece fits with the others.
        batch, window = max(batch.pieces, key=_num_elements), batch.size
        loaders = getattr(getattr(loaders, "loader", None), "iterables", None)
    several = isinstance(loaders, list)
    return SampleBatch(batch, several, _size(batch, several), window)


def to_device(trainer: pl.Trainer, batch: Any) -> Any:
    """Bring a batch to where the coordinator computes, as Lightning does."""
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _num_elements(batch: Any) -> int:
    return sum(each.numel() for each in tree_iter(batch) if isinstance(each, Tensor))


def _size(batch: Any, several: bool) -> int | None:
    try:
        size = batch_size(batch[0] if several else batch)
        first_samples(batch, size, several)
    except BatchError:
        return None
    return size


def _first_batch(loaders: Any) -> Any:
    with _apart(loaders) as combined:
        for batch, _, _ in combined:
            return batch
    raise NoSample("The train_dataloader has no batch.")


@contextmanager
def _apart(loaders: Any) -> Iterator[CombinedLoader]:
    """Loaders of the same batches; the run gets the batches taken inside again."""
    combined = CombinedLoader(
        loaders.iterables if isinstance(loaders, CombinedLoader) else loaders,
        loaders._mode if isinstance(loaders, CombinedLoader) else "max_size_cycle",
    )
    with ExitStack() as undo:
        inside = (each for loader in combined.flattened for each in _inside(loader))
        for loader in inside:
            for attribute in _attributes_of(loader):
                if (restore := restoring_generator(attribute)) is not None:
                    undo.callback(restore)
        combined.flattened = [_in_this_process(loader) for loader in combined.flattened]
        yield combined


# The attributes set by the Trainer as it sets up the training data, besides its loop's.
_SET_WITH_DATA = ("val_check_batch", "_train_start_time", "_last_val_time")


@contextmanager
def _other_data(trainer: pl.Trainer) -> Iterator[None]:
    """Inside, the training data set up by the Trainer is apart from the run's.

    `trainer.estimated_stepping_batches` sets it up, mostly in ``configure_optimizers``, and draws
    random numbers. The run has to do it again, or it would lack these draws.
    """
    loop = trainer.fit_loop
    if loop._combined_loader is not None:
        yield
        return
    before, known = {**vars(loop)}, {n: v for n, v in vars(trainer).items() if n in _SET_WITH_DATA}
    with ExitStack() as undo:

        def set_up() -> None:
            if loop._combined_loader is not None:
                return
            source = loop._data_source
            apart = undo.enter_context(_apart(source.dataloader()))
            loop._data_source = _DataLoaderSource(apart, source.name)
            loop._combined_loader_states_to_load = []
            with warnings.catch_warnings():
                # The warnings of the run's data come when the run sets it up.
                warnings.simplefilter("ignore")
                type(loop).setup_data(loop)
            loop._data_source = source

        vars(loop)["setup_data"] = set_up
        try:
            yield
        finally:
            vars(loop).clear()
            vars(loop).update(before)
            for name in _SET_WITH_DATA:
                vars(trainer).pop(name, None)
            vars(trainer).update(known)


def _in_this_process(loader: Any) -> Any:
    """A loader of the same batches that neither starts workers nor takes batches from the run.

    Raises:
        NoSample: If the data can be read only once.
    """
    if isinstance(loader, Windows):
        kept = loader.loader
        if isinstance(kept, CombinedLoader):
            kept = CombinedLoader(kept.iterables, kept._mode)
            kept.flattened = [_in_this_process(each) for each in kept.flattened]
            return windows(kept, loader.size)
        return windows(_in_this_process(kept), loader.size)
    if not isinstance(loader, DataLoader):
        return loader if isinstance(loader, Sequence) else _copied(loader)
    alone = copy.copy(loader)
    alone.num_workers = 0
    alone.prefetch_factor = None
    alone.timeout = 0
    alone.pin_memory = False
    alone._iterator = None
    if isinstance(loader.dataset, IterableDataset):
        # torch keeps the dataset of a loader from being replaced.
        vars(alone)["dataset"] = _copied(loader.dataset)
    return alone


def _inside(loader: Any) -> list[Any]:
    """The loaders inside windows; other loaders as they are."""
    return loader.loaders if isinstance(loader, Windows) else [loader]


def _copied(stream: Any) -> Any:
    """A copy of data; the data may remember its position."""
    if not isinstance(stream, Iterator):
        with contextlib.suppress(TypeError, AttributeError, RuntimeError, copy.Error):
            return copy.deepcopy(stream)
    raise NoSample("The training data can be read only once, or cannot be copied to look at it.")


def _attributes_of(loader: Any) -> Iterator[Any]:
    """The attributes of a loader and of its parts, the random generators among them."""
    names = ("batch_sampler", "sampler", "dataset", "collate_fn")
    parts = [loader, *(getattr(loader, name, None) for name in names)]
    parts.append(getattr(parts[1], "sampler", None))
    for part in parts:
        yield from getattr(part, "__dict__", {}).values()


# The optimizer steps over so many elements of a large embedding; its time is extrapolated.
_MOST_ELEMENTS = 2**22


@dataclass(frozen=True)
class OptimizerSettings:
    """The parts of a `StageOptimizer`.

    Args:
        class_name: The name from `optimizer_class_name`.
        defaults: The optimizer's own defaults.
        options: The options of its first parameter group.
    """

    class_name: str
    defaults: Mapping[str, Any]
    options: Mapping[str, Any]


@contextmanager
def with_optimizers(module: pl.LightningModule) -> Iterator[OptimizerSettings | None]:
    """Inside, the Trainer has the optimizers from ``configure_optimizers``, since a
    ``training_step`` may ask for them."""
    strategy = module.trainer.strategy
    before = strategy.optimizers, strategy.lr_scheduler_configs
    strategy.optimizers, strategy.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(module)
    try:
        yield _settings(strategy.optimizers)
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = before


def _settings(optimizers: list[Optimizer]) -> OptimizerSettings | None:
    if not optimizers or isinstance(optimizers[0], _MockOptimizer):
        return None
    optimizer = optimizers[0]
    return OptimizerSettings(
        optimizer_class_name(optimizer),
        optimizer_defaults(optimizer),
        group_options(optimizer.param_groups[0]),
    )


def step_like(
    parameters: Iterable[nn.Parameter], settings: OptimizerSettings, device: torch.device
) -> m.OptimizerMeasured:
    """Measure a step over copies of these parameters."""
    found = [_step_like_one(p, settings, device) for p in parameters if p.requires_grad]
    return m.OptimizerMeasured(
        sum(one.step_seconds for one in found), sum(one.state_bytes for one in found)
    )


def _step_like_one(
    parameter: nn.Parameter, settings: OptimizerSettings, device: torch.device
) -> m.OptimizerMeasured:
    shape = parameter.shape
    if parameter.numel() > _MOST_ELEMENTS:
        rows = max(1, _MOST_ELEMENTS * len(parameter) // parameter.numel())
        shape = torch.Size([rows, *shape[1:]])
    twin = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=device))
    twin.grad = torch.zeros_like(twin)
    group = Group(["twin"], settings.options)
    name, twins = settings.class_name, {"twin": twin}
    optimizer = StageOptimizer(name, settings.defaults, [group], twins, ImportedHere())

    def step() -> list[float]:
        device_for(device).synchronize()
        start = time.perf_counter()
        optimizer.step([settings.options])
        device_for(device).synchronize()
        return [time.perf_counter() - start]

    step()
    [seconds] = median_of_blocks(step, 0.0).seconds
    scale = parameter.numel() / max(twin.numel(), 1)
    num_bytes = round(state_bytes(optimizer.state().values()) * scale)
    return m.OptimizerMeasured(seconds * scale, num_bytes)

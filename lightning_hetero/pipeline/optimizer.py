"""A stage's part of the optimizer: its class and groups, for the stage's own parameters.

A user's own class must step each parameter by itself; this is tried on small parameters.

The file also has the parts around a step: before it sums of gradients, sent layer by layer, norms
and clipping; after it running averages of weights.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ModelError
from ..model.allowed_imports import Allowed, ImportPath, find_class, path_of
from ..model.override import stand_in
from ..optional import bitsandbytes

# Before the name of a class of bitsandbytes.
_BITSANDBYTES = "bitsandbytes."
# Between the module and the name of a user's own class.
_OWN = ":"
_LIBRARIES = frozenset({"bitsandbytes", "torch"})
_CLASSES_OF_TORCH = tuple(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
)
NOTHING_ALLOWED = Allowed()

# Tensors in the state of bitsandbytes' optimizers: bytes or float32, for a parameter of any dtype.
# Their step leaves a parameter unchanged, without an error, if its state has another dtype.
_PAGED_STATE = frozenset({"state1", "state2"})
_STATE_OF_BITSANDBYTES = _PAGED_STATE | {"qmap1", "qmap2", "absmax1", "absmax2", "unorm_vec"}
# bitsandbytes pages a state between a device of the first kind and main memory.
_PAGING_DEVICES = frozenset({"cuda", "xpu"})
_MAIN_MEMORY_DEVICES = frozenset({"cpu", "mps"})
# Optimizers of bitsandbytes keep a code book of so many numbers beside any parameter.
_MOST_BESIDE = 256
# Optimizers with preconditioners skip a larger dimension.
_LARGEST_PRECONDITIONED = 2**14


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped: multiplied by a factor, or clamped to a value."""

    factor: float | None = None
    value: float | None = None


@dataclass(frozen=True)
class Group:
    """A parameter group: the names of its parameters, and all its options."""

    parameters: Sequence[str]
    options: Mapping[str, Any]


def optimizer_class_name(optimizer: Optimizer) -> str:
    """The name under which a worker finds the optimizer's class.

    Raises:
        ModelError: If it needs all parameters in one place, or a worker could not import its class.
    """
    kind = type(optimizer)
    if getattr(torch.optim, kind.__name__, None) is kind and kind is not torch.optim.LBFGS:
        return str(kind.__name__)
    library = sys.modules.get("bitsandbytes.optim")
    if library is not None and getattr(library, kind.__name__, None) is kind:
        return f"{_BITSANDBYTES}{kind.__name__}"
    if is_of_a_library(kind):
        raise _cannot_be_cut(optimizer, "it needs all parameters in one place")
    path = path_of(kind, "optimizer class")
    _check_steps_alone(optimizer)
    return f"{path.module}{_OWN}{path.qualname}"


def _cannot_be_cut(optimizer: Optimizer, cause: str) -> ModelError:
    kind = type(optimizer)
    return ModelError(
        f"The optimizer {kind.__module__}.{kind.__qualname__} cannot be cut over stages: {cause}. "
        "Use one of torch.optim other than LBFGS, one of bitsandbytes.optim, or one that steps "
        "each parameter by itself."
    )


def is_of_torch(class_name: str) -> bool:
    """Whether a name from `optimizer_class_name` is of a class of torch.optim."""
    return _OWN not in class_name and not class_name.startswith(_BITSANDBYTES)


def is_of_a_library(kind: type[Optimizer]) -> bool:
    """Whether an optimizer's class is of a library known to every worker."""
    return kind.__module__.partition(".")[0] in _LIBRARIES


def most_in_state(parameter: Tensor) -> int:
    """The most numbers that a tensor in an optimizer's state of a parameter may have: two for each
    number of the parameter, as in AdEMAMix, a code book's, or the square of a dimension, for
    preconditioners."""
    squares = [size**2 for size in parameter.shape if size <= _LARGEST_PRECONDITIONED]
    return max(2 * parameter.numel(), _MOST_BESIDE, *squares)


def own_optimizer_modules() -> set[str]:
    """The modules of all imported optimizer classes, except of libraries known to every worker."""
    found, left = set(), Optimizer.__subclasses__()
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if not is_of_a_library(kind):
            with suppress(ModelError):
                found.add(path_of(kind, "optimizer class").module)
    return found


# A parameter of a trial has at most so many rows, columns and so on, and steps so often.
_MOST_PER_DIMENSION = 4
_NUM_TRIAL_STEPS = 5
# An optimizer may clip by the common norm of gradients, or do so below some norm. The norm is
# unknown here, so these sizes are far apart. The audit looks at real gradients.
_SIZES_OF_GRADIENTS = (1e-4, 1e4, 1.0)


def _check_steps_alone(optimizer: Optimizer) -> None:
    """Refuse an optimizer if its step of one parameter depends on other parameters.

    Small parameters with made-up gradients are stepped together. They are stepped again as if some
    were on a worker, with the options from here after the closure, and as if they moved to another
    worker between two steps.

    Raises:
        ModelError: With the cause.
    """
    groups = [
        (_trial_shapes(group["params"]), group_options(group)) for group in optimizer.param_groups
    ]
    places = [(number, shape) for number, (shapes, _) in enumerate(groups) for shape in shapes]
    options = [options for _, options in groups]
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            everything = set(range(len(places)))
            cuts = [*({number} for number in everything), everything]
            are_apart = True
            for size in _SIZES_OF_GRADIENTS:
                together = _stepped(optimizer, places, options, set(), size)
                apart = (_stepped(optimizer, places, options, cut, size) for cut in cuts)
                are_apart &= all(_are_close(together, each) for each in apart)
            moved = _stepped(optimizer, places, options, everything, moves=True)
    except Exception as error:  # the user's code
        cause = f"building it from its `defaults` and stepping fails ({error})"
        raise _cannot_be_cut(optimizer, cause) from error
    if not are_apart:
        cause = (
            "what it makes of one parameter depends on others, on chance, or on a number in its "
            "group that it changes in each step"
        )
        if _looks_before_closure(optimizer, places, options):
            cause = (
                "its `step` reads or changes gradients before it calls its closure, in which "
                "Lightning computes them, so on one device that has no effect; do it after the "
                "closure, or in `on_before_optimizer_step`"
            )
        raise _cannot_be_cut(optimizer, cause)
    if not _are_close(together, moved):
        cause = (
            "it keeps something that is not in its state of a parameter, such as a count in an "
            "attribute, and would lose that where a layer moves, or when a worker is lost; keep it "
            "in `self.state[parameter]`"
        )
        raise _cannot_be_cut(optimizer, cause)


def _looks_before_closure(
    optimizer: Optimizer,
    places: Sequence[tuple[int, tuple[int, ...]]],
    options: Sequence[Mapping[str, Any]],
) -> bool:
    """Whether results differ only because gradients come in the closure, and not before."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        inside, again, before = (
            _stepped(optimizer, places, options, set(), calls_closure=each)
            for each in (True, True, False)
        )
    return _are_close(inside, again) and not _are_close(inside, before)


def _are_close(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    pairs = zip(ones, others, strict=True)
    return all(torch.allclose(*pair, rtol=1e-5, atol=1e-7, equal_nan=True) for pair in pairs)


def _trial_shapes(parameters: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """The shapes of a group's parameters, made small, each once; a single shape comes twice."""
    shapes = sorted({tuple(min(n, _MOST_PER_DIMENSION) for n in p.shape) for p in parameters})
    return shapes * 2 if len(shapes) == 1 else shapes


def _stepped(
    optimizer: Optimizer,
    places: Sequence[tuple[int, tuple[int, ...]]],
    options: Sequence[Mapping[str, Any]],
    away: Collection[int],
    size: float = 1.0,
    moves: bool = False,
    calls_closure: bool = True,
) -> list[Tensor]:
    """Trial parameters after some steps; some of them may be stepped elsewhere.

    Args:
        optimizer: Its class and defaults are tried.
        places: The group and the shape of each parameter.
        options: The options of each group.
        away: The parameters that another optimizer steps.
        size: About how large the numbers of gradients are.
        moves: Whether these move between two steps, with their state in the optimizer.
        calls_closure: Whether gradients come in the closure, as in Lightning's loop, or before.
    """
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")
    parameters = {str(n): nn.Parameter(draw(shape)) for n, (_, shape) in enumerate(places)}

    def made(names: Collection[str]) -> Optimizer:
        groups = [
            Group([n for n in names if places[int(n)][0] == number], dict(each))
            for number, each in enumerate(options)
        ]
        return _make(type(optimizer), optimizer_defaults(optimizer), groups, parameters)

    there_names = {str(number) for number in away}
    here, there = made(parameters), made(there_names)
    for step in range(_NUM_TRIAL_STEPS):
        if moves and step == _NUM_TRIAL_STEPS // 2:
            before, there = there, made(there_names)
            there.state.update(
                {p: before.state[p] for p in parameters.values() if p in before.state}
            )
        gradients = {name: draw(each.shape) * size for name, each in parameters.items()}

        def set_gradients(names: Collection[str], found: Mapping[str, Tensor] = gradients) -> None:
            for name, parameter in parameters.items():
                parameter.grad = found[name] if name in names else None

        def closure(there: Optimizer = there) -> float:
            if there_names:
                set_gradients(there_names)
                for group, other in zip(there.param_groups, here.param_groups, strict=True):
                    group.update(group_options(other))
                there.step()
            set_gradients(parameters.keys() - there_names)
            return 0.0

        if calls_closure:
            here.step(closure)
        else:
            closure()
            here.step()
    return [parameter.detach() for parameter in parameters.values()]


def optimizer_defaults(optimizer: Optimizer) -> dict[str, Any]:
    """The arguments the optimizer was built with, as far as it has kept them."""
    # Optimizers of bitsandbytes keep a part of the arguments in ``args``.
    arguments = dict(vars(optimizer.args)) if hasattr(optimizer, "args") else {}
    if type(optimizer).__name__.endswith("bit"):
        del arguments["optim_bits"]  # implied by the class: its constructor lacks it
    if hasattr(optimizer, "is_paged"):
        arguments["is_paged"] = optimizer.is_paged
    return {**optimizer.defaults, **arguments}


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group: all its entries except its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


# Settings of a step's kernels; some devices lack them.
_KERNELS = ("fused", "foreach", "capturable")


@dataclass(frozen=True)
class Stepped:
    """A parameter with its optimizer's state, before or after a step.

    Args:
        weight: The parameter's content.
        state: The optimizer's state of it; empty without one.
        options: The options of its group.
    """

    weight: Tensor
    state: Mapping[str, Any]
    options: Mapping[str, Any]

    def stepped_alone(self, optimizer: Optimizer, gradient: Tensor | None, group: int) -> Stepped:
        """Step this parameter by itself, with an optimizer as it would be made now.

        Args:
            optimizer: The step takes its class, defaults and plain attributes; it does not step
                itself.
            gradient: The parameter's gradient, if it has one.
            group: The number of the parameter's group.
        """
        parameter = nn.Parameter(self.weight.detach().clone())
        parameter.grad = None if gradient is None else gradient.clone()
        groups = [
            Group(["0"] if number == group else [], group_options(each))
            for number, each in enumerate(optimizer.param_groups)
        ]
        kernels = dict.fromkeys(self.options.keys() & {*_KERNELS})
        options = {**self.options, **kernels}
        groups[group] = Group(["0"], options)
        defaults = {**optimizer_defaults(optimizer), **kernels}
        with torch.random.fork_rng(devices=[]):
            alone = _make(type(optimizer), defaults, groups, {"0": parameter})
            for name, value in vars(optimizer).items():
                if type(value) in (bool, int, float, str) and name in vars(alone):
                    setattr(alone, name, value)
            alone.param_groups[group].update(options)
            if self.state:
                state = copy.deepcopy(self.state)
                alone.state[parameter] = state_beside(alone, parameter, state, options)
            alone.step()
        found = group_options(alone.param_groups[group])
        options_behind = {key: value for key, value in found.items() if key not in kernels}
        return Stepped(parameter.detach(), dict(alone.state.get(parameter, {})), options_behind)

    def difference(self, other: Stepped, before: Stepped) -> float:
        """How far two results of one step are apart, relative to the step; 0 where rounding
        explains it.

        Args:
            other: The other result.
            before: The common state before the step.
        """
        found = [_apart(self.weight, other.weight, before.weight)]
        for key in self.state.keys() | other.state.keys():
            mine, its = self.state.get(key), other.state.get(key)
            if isinstance(mine, Tensor) and isinstance(its, Tensor):
                # Packed numbers have no distance.
                if mine.is_floating_point() and its.is_floating_point():
                    found.append(_apart(mine, its, before.state.get(key)))
            elif isinstance(mine, (int, float)) and isinstance(its, (int, float)):
                found.append(abs(mine - its))
            elif (mine is None) != (its is None):
                found.append(math.inf)
        return max(found)

    def changed_options(self, other: Mapping[str, Any]) -> list[str]:
        """The names of the group's options with other numbers than here."""
        return [
            key
            for key, value in self.options.items()
            if isinstance(value, float)
            and isinstance(other.get(key), (int, float))
            and not math.isclose(value, other[key], rel_tol=1e-5, abs_tol=1e-12)
        ]


# Of a step, kernels of two devices leave less than this part.
_ROUNDING_OF_STEP = 1e-3
_ROUNDINGS_OF_WEIGHT = 4


def _apart(one: Tensor, other: Tensor, before: Any) -> float:
    """The difference of a step's two results, relative to the change."""
    if one.shape != other.shape:
        return math.inf
    first, second = (each.detach().cpu().double() for each in (one, other))
    begin = before.detach().cpu().double() if isinstance(before, Tensor) else 0.0 * first
    is_equal = (first == second) | (first.isnan() & second.isnan())
    difference = float((first - second).masked_fill(is_equal, 0.0).norm())
    moved = max(float((first - begin).norm()), float((second - begin).norm()))
    size = max(float(first.norm()), float(second.norm()))
    coarse = min((one.dtype, other.dtype), key=lambda dtype: dtype.itemsize)
    rounding = _ROUNDINGS_OF_WEIGHT * torch.finfo(coarse).eps * size
    if difference <= rounding + _ROUNDING_OF_STEP * moved:
        return 0.0
    return difference / moved if moved and math.isfinite(difference) else math.inf


class StageOptimizer:
    """An optimizer over a stage's parameters.

    Args:
        class_name: A name from `optimizer_class_name`.
        defaults: The defaults of the whole optimizer. The constructor gets its own arguments among
            them, because it reads some, like Adagrad's initial value, only there.
        groups: All groups of the whole optimizer, each with only the stage's parameters. All stages
            have equally many groups in the same order, so options can be sent by position.
        parameters: The stage's parameters by name.
        allowed: The allowed classes besides the classes of torch and bitsandbytes.

    Raises:
        ModelError: If the class or a parameter does not exist, or the class is not allowed.
    """

    def __init__(
        self,
        class_name: str,
        defaults: Mapping[str, Any],
        groups: Sequence[Group],
        parameters: Mapping[str, nn.Parameter],
        allowed: Allowed = NOTHING_ALLOWED,
    ) -> None:
        kind = _find_class(class_name, parameters, allowed)
        unknown = {name for group in groups for name in group.parameters} - set(parameters)
        if unknown:
            raise ModelError(f"The stage has no parameters {sorted(unknown)} to optimize.")
        self._parameters = parameters
        self.optimizer = _make(kind, defaults, groups, parameters)
        self._has_stepped = False
        page_by_device(self.optimizer, parameters.values())
        # A parameter outside of the optimizer's groups may still have a state.
        self._group_of = {id(p): g for g in self.optimizer.param_groups for p in g["params"]}

    @property
    def optimized(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer steps, by name."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self._parameters.items() if id(p) in held}

    def step(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Step with these options, one mapping per group.

        Raises:
            ModelError: If the first step leaves a sparse state, which cannot be sent.
        """
        for group, group_values in zip(self.optimizer.param_groups, options, strict=True):
            group.update(group_values)
        self.optimizer.step()
        if not self._has_stepped:
            self._has_stepped = True
            self._refuse_sparse_states()

    def _refuse_sparse_states(self) -> None:
        for name, state in self.state().items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.layout is not torch.strided:
                    raise ModelError(
                        f"The {key} of {name} in {type(self.optimizer).__name__} is sparse, as its "
                        "gradient is, and could not be saved from a worker. Make the embedding "
                        "with `sparse=False`, or keep its layer with the coordinator."
                    )

    def state(self) -> dict[str, dict[str, Any]]:
        """The state of each parameter with a state, by name."""
        state = self.optimizer.state
        return {name: state[p] for name, p in self._parameters.items() if state.get(p)}

    def load_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Replace the state of one parameter.

        Raises:
            ModelError: If the stage lacks the parameter.
        """
        if name not in self._parameters:
            raise ModelError(f"The stage has no parameter {name!r} to load optimizer state for.")
        parameter = self._parameters[name]
        group = self._group_of.get(id(parameter), {})
        self.optimizer.state[parameter] = state_beside(self.optimizer, parameter, state, group)


def _make(
    kind: Any,
    defaults: Mapping[str, Any],
    groups: Sequence[Group],
    parameters: Mapping[str, nn.Parameter],
) -> Optimizer:
    """Build an optimizer over some parameters."""
    accepted = inspect.signature(kind).parameters
    made: Optimizer = kind(
        [
            {**group.options, "params": [parameters[name] for name in group.parameters]}
            for group in groups
        ],
        **{key: value for key, value in defaults.items() if key in accepted},
    )
    return made


def _find_class(class_name: str, parameters: Mapping[str, nn.Parameter], allowed: Allowed) -> Any:
    if _OWN in class_name:
        module, _, name = class_name.partition(_OWN)
        return find_class(allowed, ImportPath(module, name), Optimizer, "optimizer class")
    library: Any = torch.optim
    if class_name.startswith(_BITSANDBYTES):
        package = bitsandbytes()
        devices = {parameter.device.type for parameter in parameters.values()}
        if not devices <= set(package.supported_torch_devices):
            raise ModelError(
                f"bitsandbytes has no optimizers for the device {', '.join(sorted(devices))}. Use "
                "one of torch.optim, or leave this worker out."
            )
        library, class_name = package.optim, class_name.removeprefix(_BITSANDBYTES)
    kind: Any = getattr(library, class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ModelError(
            f"{library.__name__} has no optimizer {class_name!r} here. Install the coordinator's "
            "version of the library on this worker."
        )
    return kind


def page_by_device(optimizer: Any, parameters: Iterable[Tensor]) -> Callable[[], object]:
    """Let a paged optimizer of bitsandbytes page only where a device has a memory of its own.

    In main memory it would only warn, or fail.

    Args:
        optimizer: Any optimizer.
        parameters: The parameters that it steps in this process.

    Returns:
        A function that undoes this.

    Raises:
        ModelError: If bitsandbytes cannot page the memory of the device.
    """
    devices = {parameter.device.type for parameter in parameters}
    if not is_paged(optimizer) or _PAGING_DEVICES.issuperset(devices):
        return lambda: None
    if not _MAIN_MEMORY_DEVICES.issuperset(devices):
        raise ModelError(
            f"bitsandbytes cannot page the state of {type(optimizer).__name__} on the device "
            f"{', '.join(sorted(devices))}. Use an optimizer that is not paged, or leave this "
            "device out."
        )
    return stand_in(optimizer, "is_paged", False)


def overridden(optimizer: Any) -> list[Tensor]:
    """The parameters with settings of their own in bitsandbytes' `GlobalOptimManager`."""
    manager = getattr(optimizer, "mng", None)
    if manager is None:
        return []
    of_modules = [getattr(module, name) for module, name, _ in manager.module_weight_config_triple]
    ids = {*manager.pid2config, *map(id, of_modules)}
    return [
        parameter
        for number, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
        if id(parameter) in ids or (number, position) in manager.index2config
    ]


def is_paged(optimizer_or_state: Any) -> bool:
    """Whether bitsandbytes pages an optimizer's state, or a tensor of it."""
    return bool(getattr(optimizer_or_state, "is_paged", False))


def state_beside(
    optimizer: Optimizer, parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of a parameter, on its device and in its dtype, and in pages if the optimizer is
    paged.

    A step count stays unchanged, unless the parameter's group is fused or capturable: such a step
    runs on the device, with the count in float32 there.
    """
    counts_on_device = bool(group.get("fused") or group.get("capturable"))
    paged = _PAGED_STATE if is_paged(optimizer) else frozenset()
    return {
        key: _in_pages(optimizer, parameter, in_dtype_of(optimizer, parameter, key, value))
        if key in paged and isinstance(value, Tensor)
        else _beside(optimizer, parameter, key, value, counts_on_device)
        for key, value in state.items()
    }


def _in_pages(optimizer: Any, parameter: Tensor, value: Tensor) -> Tensor:
    """A tensor of a state in pages; bitsandbytes' own loading would put it on the device."""
    if is_paged(value):
        return value
    # Only its shape and device count, and this takes no memory.
    like = torch.empty(1, device=parameter.device).expand(value.shape)
    page: Tensor = optimizer.get_state_buffer(like, dtype=value.dtype)
    return page.copy_(value)


def _beside(
    optimizer: Optimizer, parameter: Tensor, key: str, value: Any, counts_on_device: bool
) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key == "step":
        return value.to(parameter.device, torch.float32) if counts_on_device else value
    return in_dtype_of(optimizer, parameter, key, value).to(parameter.device)


def _is_of_bitsandbytes(optimizer: Optimizer) -> bool:
    """Whether the class is of bitsandbytes, or derived from one."""
    return any(kind.__module__.startswith(_BITSANDBYTES) for kind in type(optimizer).__mro__)


def in_dtype_of(optimizer: Optimizer, parameter: Tensor, key: str, value: Any) -> Any:
    """A state value in the dtype in which the optimizer has it beside the parameter.

    The optimizers of torch have tensors of the parameter's shape in the parameter's dtype. One of
    the user's own may keep float32 beside bfloat16, and its state stays as it made it.
    """
    if not isinstance(value, Tensor) or not value.is_floating_point() or key == "step":
        return value
    if key in _STATE_OF_BITSANDBYTES and _is_of_bitsandbytes(optimizer):
        return value.float()
    follows = isinstance(optimizer, _CLASSES_OF_TORCH) and value.shape == parameter.shape
    return value.to(parameter.dtype) if follows else value


@contextmanager
def leaving_by_layer(
    parameters: Iterable[tuple[str, Tensor]], send: Callable[[dict[str, Tensor]], None]
) -> Iterator[None]:
    """Inside, a backward adds to these parameters' gradients for the last time in a step.

    Args:
        parameters: Their names begin with the number of their layer.
        send: Called with the gradients of a layer when the next layer's gradients come, and at the
            end.
    """
    layer: dict[str, Tensor] = {}

    def note(name: str, parameter: Tensor) -> None:
        number = name.partition(".")[0]
        if any(other.partition(".")[0] != number for other in layer):
            send({**layer})
            layer.clear()
        if parameter.grad is not None:
            layer[name] = parameter.grad

    with ExitStack() as hooks:
        for name, parameter in parameters:
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(partial(note, name))
                hooks.callback(hook.remove)
        yield
    if layer:
        send(layer)


def optimizer_gradients(optimizer: Optimizer) -> list[Tensor]:
    """The gradients here for the optimizer's next step."""
    groups = optimizer.param_groups
    return gradients_here(p for group in groups for p in group["params"])


def gradients_here(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of parameters in this process."""
    return [p.grad for p in parameters if not p.is_meta and p.grad is not None]


def gradient_norms(gradients: Sequence[Tensor]) -> list[float]:
    """The 2-norm of each gradient, in float32 or wider, because float16 ends at 65504."""
    norms = [
        torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
    ]
    if not norms:
        return []
    dtype = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    # All at once, because each `item` would wait for the device.
    found: list[float] = torch.stack([norm.to(dtype) for norm in norms]).tolist()
    return found


def clip_gradients(gradients: Sequence[Tensor], clipping: Clipping) -> None:
    """Clip gradients in place."""
    for gradient in gradients:
        if clipping.factor is not None:
            gradient.mul_(clipping.factor)
        if clipping.value is not None:
            gradient.clamp_(-clipping.value, clipping.value)


def total_norm(norms: Sequence[float]) -> float:
    """The norm of all gradients together: the root of the sum of the squared norms.

    It is summed by size, so it depends neither on the plan nor on the order of arrival.
    """
    return math.sqrt(sum(sorted(norm * norm for norm in norms)))


def clipping_factor(max_norm: float, norm: float) -> float:
    """The factor for the gradients of all stages, as in `torch.nn.utils.clip_grad_norm_`."""
    factor = max_norm / (norm + 1e-6)
    # Not min(): a norm of NaN must give a factor of NaN on every stage.
    return 1.0 if factor > 1.0 else factor


AveragingAction = Literal["begin", "go on", "update", "swap", "adopt"]


class WeightAverages:
    """Running averages of tensors; at first they equal the tensors.

    Args:
        tensors: Parameters and buffers of floating-point numbers, by name.
        present: Averages to go on with, by the names of their tensors.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], present: Mapping[str, Tensor] | None = None
    ) -> None:
        self._tensors, going_on = dict(tensors), present or {}
        self.present = {
            name: going_on[name].to(tensor) if name in going_on else tensor.detach().clone()
            for name, tensor in tensors.items()
        }

    @property
    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return [(tensor, self.present[name]) for name, tensor in self._tensors.items()]

    def include(self, tensors: Mapping[str, Tensor]) -> None:
        """Average these too; call it before the first step of unfrozen tensors, which equal their
        average until then."""
        added = {name: tensor for name, tensor in tensors.items() if name not in self._tensors}
        self._tensors.update(added)
        self.present.update({name: tensor.detach().clone() for name, tensor in added.items()})

    @torch.no_grad()
    def update(self, num_averaged: int, decay: float | None) -> None:
        """Add the present weights to the averages, as torch's `AveragedModel` does.

        Args:
            num_averaged: How many updates came before; the first update copies the weights.
            decay: The staying share of the average; None weighs all updates equally.
        """
        for tensor, average in self._pairs:
            if num_averaged == 0:
                average.copy_(tensor)
            elif decay is None:
                average.lerp_(tensor, 1 / (num_averaged + 1))
            else:
                average.copy_(decay * average + (1 - decay) * tensor)

    def swap(self) -> None:
        """Exchange the weights and their averages, without a copy."""
        for tensor, average in self._pairs:
            tensor.data, average.data = average.data, tensor.data

    @torch.no_grad()
    def adopt(self) -> None:
        """Make the averages the weights."""
        for tensor, average in self._pairs:
            tensor.copy_(average)


def averaged_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module to average: trained parameters and buffers held here.

    A frozen parameter equals its average.
    """
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    buffers = [(name, b) for name, b in module.named_buffers() if b.is_floating_point()]
    return {name: tensor for name, tensor in (*trained, *buffers) if not tensor.is_meta}

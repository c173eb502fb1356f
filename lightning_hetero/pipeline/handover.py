"""The hand-over: a forward leaves the coordinator's part of the model, and comes back to it.

In the micro-batch of a driver, `driver.py` does the whole hand-over. Everywhere else (evaluation, a
whole batch at once, a user's call in a hook) the hand-over is one function of the hidden states:
it cuts a `Request` into pieces along the samples, streams the pieces through the stages, and joins
the results. `exchange_whole` makes that function differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..devices.numerics import numerics_here
from ..devices.thread_device import ThreadDevice
from ..errors import BatchError, ModelError
from ..model.carried_tensors import is_carried
from ..model.layer_call import LayerCall
from ..model.layers import last_decoder_layer
from .boundary import (
    Activation,
    Collected,
    Gradients,
    Surroundings,
    along_samples,
    join_activations,
)
from .microbatch import spans
from .random_numbers import FIRST_TRIAL, MicrobatchDraws
from .rule import Key

Content = TypeVar("Content", Activation, Gradients)

NOTHING: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class Returned:
    """An activation, or gradients, returned from the stages."""

    key: Key
    content: Activation | Gradients


class Stages(Protocol):
    """The remote stages, seen from the coordinator's part of the pipeline."""

    def begin_step(
        self,
        max_in_flight: int,
        accumulate: bool,
        dropout_step: int | None = None,
        *,
        first_microbatch: int = 0,
        forwards_first: bool = False,
    ) -> None:
        """Start a step on every stage.

        Args:
            max_in_flight: The most micro-batches in flight on a stage.
            accumulate: Whether the step adds to the present gradients.
            dropout_step: The number of its batch for dropout masks; None counts on.
            first_microbatch: The number of its first micro-batch.
            forwards_first: Whether workers run forwards before backwards; see `choose`.
        """

    def next_batch(self, first_microbatch: int, dropout_step: int) -> None:
        """Let the micro-batches of another batch go on with the step; see `begin_step`."""

    def abort_step(self) -> None:
        """Make every stage forget the present step; this must not raise."""

    def send_forward(
        self, key: Key, hidden: Tensor, surroundings: Surroundings, is_whole: bool = False
    ) -> None:
        """Send hidden states to the first stage, and each stage its layers' arguments.

        Args:
            key: The micro-batch and visit.
            hidden: The hidden states.
            surroundings: The arguments.
            is_whole: Whether it is a piece of a whole batch; only workers run its layers.
        """

    def send_backward(
        self, key: Key, gradients: Gradients, unsent: Collection[int] | None = None
    ) -> None:
        """Send the gradients of a returned activation to the last stage.

        Args:
            key: The micro-batch and visit.
            gradients: Of the activation.
            unsent: The micro-batches of the step with more gradients after these, if known and an
                optimizer steps after them.
        """

    def reduce(self) -> None:
        """Let replicas add up their gradients: all have been sent, and an optimizer steps next."""

    def receive(self) -> Returned:
        """Wait for the next activation or gradients to come back."""

    def take_arrived(self) -> list[Returned]:
        """All activations and gradients returned by now; does not wait."""


@dataclass(frozen=True)
class Request:
    """Hidden states on their way through the stages."""

    hidden: Tensor
    surroundings: Surroundings

    @property
    def entering(self) -> Activation:
        """All tensors into the first layer, as they cross the boundary."""
        carried = self.surroundings.carried.items()
        return Activation(self.hidden, tuple(Collected(*each) for each in carried))


def surroundings_here(
    hidden: Tensor,
    calls: list[LayerCall],
    collect: Sequence[str] = (),
    carried: Mapping[str, Tensor] = NOTHING,
) -> Surroundings:
    """The settings of this thread's forward, with the arguments of the layers, and the tensors into
    the first one besides the hidden states."""
    device = hidden.device.type
    grad_enabled = torch.is_grad_enabled()
    autocast_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return Surroundings(
        grad_enabled,
        autocast_dtype,
        calls,
        collect,
        numerics=numerics_here(),
        default_dtype=torch.get_default_dtype(),
        carried=carried,
    )


@dataclass(frozen=True)
class Exchange:
    """One visit of a batch's pieces to the stages.

    Args:
        stages: The remote stages.
        visit: The number of the visit.
        most_under_way: The most pieces away at once, to bound the memory of a slow stage. In a
            driver's step the rule bounds it.
        dim: The hidden states' dimension of samples, or of tokens if these are cut.
        is_along_tokens: Whether the pieces are slices of a sequence: their backwards run from the
            last one to the first.
    """

    stages: Stages
    visit: int
    most_under_way: int
    dim: int = 0
    is_along_tokens: bool = False

    def forward(self, pieces: Sequence[Request]) -> list[Activation]:
        """Stream pieces through the stages, and return their results in the pieces' order."""

        def send(key: Key) -> None:
            piece = pieces[key.microbatch]
            self.stages.send_forward(key, piece.hidden, piece.surroundings, is_whole=True)

        return self._stream(send, range(len(pieces)), Activation)

    def backward(self, pieces: Sequence[Gradients]) -> list[Gradients]:
        """Stream the gradients of pieces back, and return the gradients of the pieces' inputs."""

        def send(key: Key) -> None:
            self.stages.send_backward(key, pieces[key.microbatch])

        order = range(len(pieces))
        return self._stream(send, order[::-1] if self.is_along_tokens else order, Gradients)

    def _stream(
        self, send: Callable[[Key], None], order: range, kind: type[Content]
    ) -> list[Content]:
        found: dict[int, Content] = {}
        num_sent = 0
        while len(found) < len(order):
            while num_sent < min(len(order), len(found) + self.most_under_way):
                send(Key(order[num_sent], self.visit))
                num_sent += 1
            returned = self.stages.receive()
            # A failed exchange may have left pieces of another visit under way.
            if isinstance(returned.content, kind) and returned.key.visit == self.visit:
                returned.content.land()
                found[returned.key.microbatch] = returned.content
        return [found[index] for index in sorted(order)]


def exchange_whole(
    hidden: Tensor, exchange: Exchange, pieces: list[Request], others: Sequence[Tensor] = ()
) -> Activation:
    """The hand-over of a whole batch as one differentiable function of its hidden states and its
    other tensors.

    Three nodes of autograd share a `_Crossing`, and only tokens pass between them:

        hidden ── _Entry ── token ── _Stages ── token ── _Exit ── outputs
                  device           main memory           device

    autograd runs a node's backward in a thread of its gradient's device; meanwhile the caller of
    ``backward`` cannot handle signals. A gradient in main memory comes to the caller's own thread,
    so `_Stages` waits for the stages there.

    Args:
        hidden: The hidden states.
        exchange: The visit.
        pieces: The pieces of the request with these hidden states.
        others: The other tensors, in the order of the request.
    """
    shapes = [tensor.shape for tensor in (hidden, *others)]
    crossing = _Crossing(exchange, pieces, hidden.device, ThreadDevice.present(), shapes)
    # Without an anchor a backward would miss the stages if all before them is frozen.
    anchor = torch.zeros((), device="cpu", requires_grad=True)
    entered = _Entry.apply(crossing, hidden, *others)  # type: ignore[no-untyped-call]
    crossed = _Stages.apply(entered, anchor, crossing)  # type: ignore[no-untyped-call]
    first, *others = _Exit.apply(crossed, crossing)  # type: ignore[no-untyped-call]
    return Activation(first, tuple(map(Collected, crossing.kinds, others)))


@dataclass
class _Crossing:
    """The common state of the nodes of one hand-over; a pass of tensors between them empties its
    field.

    Args:
        exchange: The visit.
        pieces: The pieces.
        device: The device of the hidden states.
        thread_device: The device and stream of the forward's thread.
        shapes: Of the tensors that leave, whole.
    """

    exchange: Exchange
    pieces: list[Request]
    device: torch.device
    thread_device: ThreadDevice
    shapes: Sequence[torch.Size]
    kinds: list[str] = field(default_factory=list)
    outputs: tuple[Tensor, ...] = ()
    output_gradients: Sequence[Tensor | None] = ()
    gradients: tuple[Tensor | None, ...] = ()


class _Entry(torch.autograd.Function):
    """Where hidden states and other tensors leave; its backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, crossing: _Crossing, hidden: Tensor, *others: Tensor) -> Tensor:
        ctx.crossing, ctx.num_tensors = crossing, 1 + len(others)
        # Token ids have no gradient, and a token of their dtype would have none either.
        return hidden.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.crossing.gradients = ctx.crossing.gradients, ()
        return None, *(gradients or (None,) * ctx.num_tensors)


class _Stages(torch.autograd.Function):
    """The visit to the stages, forward and backward, in the asking threads."""

    @staticmethod
    def forward(ctx: Any, entered: Tensor, _anchor: Tensor, crossing: _Crossing) -> Tensor:
        returned = crossing.exchange.forward(crossing.pieces)
        dim = crossing.exchange.dim
        joined = join_activations(returned, dim).map(lambda tensor: tensor.to(crossing.device))
        crossing.outputs = joined.tensors
        crossing.kinds += [kind for kind, _ in joined.collected]
        ctx.crossing, ctx.token = crossing, torch.zeros_like(entered)
        entering = [piece.entering for piece in crossing.pieces]
        ctx.entered = _Cuts.of(entering, dim, crossing.shapes)
        ctx.returned = _Cuts.of(returned, dim)
        crossing.pieces = []
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, None, None]:
        _check_backward(anchor_node=ctx.next_functions[1][0])
        # `retain_graph` of the user's backward; autograd asks for it here for compiled graphs too.
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        crossing: _Crossing = ctx.crossing
        gradients, crossing.output_gradients = crossing.output_gradients, ()
        # The gradients were made in the stream of the forward, whatever the caller's is.
        with crossing.thread_device.stream_taken_over():
            pieces = ctx.returned.split(gradients, keeps_graph)
            joined = ctx.entered.join(crossing.exchange.backward(pieces))
            if not ctx.needs_input_grad[0] or not any(each is not None for each in joined):
                return None, None, None
            crossing.gradients = tuple(
                None if each is None else each.to(crossing.device) for each in joined
            )
        return ctx.token, None, None


class _Exit(torch.autograd.Function):
    """Where the outputs of the stages come back; its backward takes their gradients."""

    @staticmethod
    def forward(ctx: Any, _crossed: Tensor, crossing: _Crossing) -> tuple[Tensor, ...]:
        ctx.crossing = crossing
        # None, and not zeros, for outputs without a loss.
        ctx.set_materialize_grads(False)
        outputs, crossing.outputs = crossing.outputs, ()
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        ctx.crossing.output_gradients = gradients
        return torch.zeros((), device="cpu"), None


def _check_backward(anchor_node: Any) -> None:
    """Refuse a backward that the stages cannot run as asked."""
    if torch.is_grad_enabled():
        raise ModelError(
            "A backward with `create_graph=True` reached the layers on workers, which cannot "
            "compute gradients of gradients. Keep the model that needs them, such as the "
            "discriminator of a gradient penalty, with the coordinator."
        )
    if not torch._C._will_engine_execute_node(anchor_node):
        raise ModelError(
            "A backward for some tensors only (`torch.autograd.grad`, or `backward(inputs=...)`) "
            "reached the layers on workers, which would add to the gradients of all their "
            "parameters. Use a whole `backward`, and `toggle_optimizer` to leave parameters out."
        )


@dataclass(frozen=True)
class _Cuts:
    """How the tensors of an activation were cut into pieces along the samples.

    Args:
        dims: For each tensor the dimension of samples; None for a tensor without samples: it is
            whole in every piece.
        sizes: For each tensor its samples in each piece.
    """

    dims: Sequence[int | None]
    sizes: Sequence[Sequence[int]]

    @classmethod
    def of(cls, pieces: Sequence[Activation], dim: int, shapes: Sequence[torch.Size] = ()) -> _Cuts:
        """The cuts between pieces.

        Args:
            pieces: The activations of the pieces.
            dim: The hidden states' dimension of samples.
            shapes: Of the whole tensors, if known: one as large in each piece is not cut, though it
                has by chance as many rows as the piece has samples.
        """
        dims: list[int | None] = []
        sizes = []
        columns = zip(*(piece.tensors for piece in pieces), strict=True)
        kinds = ["", *(kind for kind, _ in pieces[0].collected)]
        for kind, column in zip(kinds, columns, strict=True):
            # Collected outputs are joined along their first dimension, whatever their sizes.
            along = along_samples(pieces, column, dim) if is_carried(kind) else dim
            along = along if column[0].ndim else None  # a loss
            if is_carried(kind) and shapes and column[0].shape == shapes[len(dims)]:
                along = None
            dims.append(along)
            sizes.append([0 if along is None else tensor.shape[along] for tensor in column])
        return cls(dims, sizes)

    def split(self, gradients: Sequence[Tensor | None], keeps_graph: bool) -> list[Gradients]:
        """The gradients of each piece. The gradient of a tensor without samples goes to the first
        piece: the tensor is the same in all pieces. Losses in place of hidden states are added up,
        so each piece has the gradient of their sum."""
        columns: list[Sequence[Tensor | None]] = []
        for place, (gradient, dim, sizes) in enumerate(
            zip(gradients, self.dims, self.sizes, strict=True)
        ):
            if dim is None and place == 0:
                columns.append([gradient] * len(sizes))
            elif gradient is None or dim is None:
                columns.append([gradient, *[None] * (len(sizes) - 1)])
            else:
                columns.append(gradient.split(list(sizes), dim))
        return [Gradients(piece, keeps_graph) for piece in zip(*columns, strict=True)]

    def join(self, pieces: Sequence[Gradients]) -> list[Tensor | None]:
        """The gradient of each tensor: without samples it is the sum over the pieces."""
        joined: list[Tensor | None] = []
        for place, dim in enumerate(self.dims):
            tensors = [
                each.tensors[place] if place < len(each.tensors) else None for each in pieces
            ]
            found = [tensor for tensor in tensors if tensor is not None]
            if dim is None and found:
                joined.append(torch.stack(found).sum(0))
            else:
                joined.append(torch.cat(found, dim or 0) if len(found) == len(pieces) else None)
        return joined


class SampleDimension:
    """Finds the dimension of samples in hidden states.

    A batch with as many samples as positions does not show the dimension, so the class remembers
    the dimension of earlier batches.

    Args:
        choice: The user's dimension, if named.
        is_sequence_first: Whether a module of the layers has ``batch_first=False``.
    """

    def __init__(self, choice: int | None, is_sequence_first: bool) -> None:
        self._choice = choice
        self._allowed = {0, 1} if is_sequence_first else {0}
        self._shown: int | None = None

    def find(self, hidden: Tensor, num_samples: int | None) -> int | None:
        """The dimension; None if it is unknown and the batch must stay in one piece.

        Args:
            hidden: Hidden states, or token ids for an embedding.
            num_samples: How many samples the batch has, if known.

        Raises:
            BatchError: If not exactly one dimension fits the samples.
        """
        dims = range(hidden.ndim - 1 if hidden.is_floating_point() else hidden.ndim)
        if not dims:
            raise BatchError(
                f"Hidden states of shape {tuple(hidden.shape)} have no dimension that counts "
                "samples. Keep the layers that take them with the coordinator."
            )
        if self._choice is not None and self._choice in dims:
            return self._choice
        if num_samples is None:
            return self._shown if self._shown in self._allowed else None
        fits = {dim for dim in dims[:2] if hidden.shape[dim] == num_samples}
        if len(fits) == 1:
            (self._shown,) = fits
        elif self._shown is not None:
            fits &= {self._shown}
        fits &= self._allowed
        if len(fits) != 1:
            raise BatchError(
                f"The batch has {num_samples} samples, but the hidden states have the shape "
                f"{tuple(hidden.shape)}. Name the dimension that counts samples: `batch_dim=0`, or "
                "`batch_dim=1` for layers that take the sequence first."
            )
        return fits.pop()


def takes_sequence_first(layer: nn.Module) -> bool:
    """Whether a module inside a layer declares its second dimension as the dimension of samples.

    torch's attention, transformer and recurrent modules do so by default.
    """
    return any(getattr(module, "batch_first", None) is False for module in layer.modules())


# By the name of an argument, its rows for each sample, if not one: zero in an argument without
# samples, whatever its number of rows; one per head in a mask of torch's attention.
Rows = Mapping[str, int]
_ONE_EACH: Rows = MappingProxyType({})


def cut_request(
    request: Request, num_pieces: int, dim: int = 0, rows: Rows = _ONE_EACH
) -> list[Request]:
    """Cut a request along the samples. A tensor without samples goes into every piece.

    Args:
        request: A request of a whole batch.
        num_pieces: The most pieces.
        dim: The hidden states' dimension of samples.
        rows: The rows of each sample in arguments, if not one.

    Raises:
        BatchError: If an argument is ambiguous, or collected outputs could not be joined.
    """
    size = request.hidden.shape[dim]
    if size == 1 or num_pieces == 1:
        return [request]
    if dim and request.surroundings.collect:
        raise BatchError(
            f"The model collects the outputs {list(request.surroundings.collect)}, and their "
            "dimension of samples is unknown. Collect no outputs, or use layers that take samples "
            "first."
        )
    for name, tensor in _named_tensors(request):
        if name not in rows:
            _check_clear(name, tensor, request.hidden)
    for tensor in request.surroundings.carried.values():
        _check_clear("that carries gradients", tensor, request.hidden)
    cuts = _Cutting.of(request, dim, rows)
    return [_piece(request, start, end, cuts) for start, end in spans(size, num_pieces)]


def first_of_request(request: Request, count: int, dim: int = 0, rows: Rows = _ONE_EACH) -> Request:
    """The piece of a request with its first samples; see `cut_request` for the arguments.

    Raises:
        BatchError: If an argument is ambiguous, or collected outputs could not be joined.
    """
    if count < request.hidden.shape[dim]:
        cut_request(request, 2, dim, rows)  # raises if the request cannot be cut
    return _piece(request, 0, count, _Cutting.of(request, dim, rows))


@dataclass(frozen=True)
class _Cutting:
    """Where the samples are in the tensors besides the hidden states.

    Args:
        size: How many samples there are.
        dim: The hidden states' dimension of samples.
        rows: By the identity of a tensor, its rows for each sample, if not one.
    """

    size: int
    dim: int
    rows: Mapping[int, int]

    @classmethod
    def of(cls, request: Request, dim: int, rows: Rows) -> _Cutting:
        # A walk through all arguments takes long.
        named = _named_tensors(request) if rows else ()
        found = {id(tensor): rows[name] for name, tensor in named if name in rows}
        return cls(request.hidden.shape[dim], dim, found)

    def along(self, tensor: Tensor) -> int | None:
        """The dimension along which an argument is cut; None if it stays whole."""
        rows = self.rows_of(tensor)
        if rows == 1:
            return dim_of_samples(tensor, self.size, self.dim)
        return 0 if rows and _has_rows(tensor, rows * self.size) else None

    def rows_of(self, tensor: Tensor) -> int:
        """The rows of each sample in an argument."""
        return self.rows.get(id(tensor), 1)


def _piece(request: Request, start: int, end: int, cutting: _Cutting) -> Request:
    """Some samples of a request."""
    # Layers share tensors such as masks; cut each one once, so that it is sent once.
    cuts: dict[int, Tensor] = {}
    dim = cutting.dim

    def cut(tensor: Tensor) -> Tensor:
        along, rows = cutting.along(tensor), cutting.rows_of(tensor)
        if along is None:
            return tensor
        piece = tensor.narrow(along, rows * start, rows * (end - start))
        return cuts.setdefault(id(tensor), piece)

    def cut_operand(tensor: Tensor) -> Tensor:
        has_samples = _operand_has_samples(tensor, cutting.size, dim)
        return tensor.narrow(dim, start, end - start) if has_samples else tensor

    calls = [call.with_tensors(cut, cut_operand) for call in request.surroundings.calls]
    hidden = request.hidden.narrow(dim, start, end - start)
    carried = {name: cut(tensor) for name, tensor in request.surroundings.carried.items()}
    return Request(hidden, replace(request.surroundings, calls=calls, carried=carried))


def _named_tensors(request: Request) -> Iterator[tuple[str, Tensor]]:
    """Every tensor among the arguments of the layers, with the name of its argument."""
    for call in request.surroundings.calls:
        yield from call.named_tensors()


def other_rows(request: Request, dim: int) -> Rows:
    """How many rows each sample may have in ambiguous arguments.

    Zero if there are as many rows as samples, perhaps by chance, and several if there are a
    multiple: a mask of torch's attention has the shape (samples x heads, length, length).
    """
    size = request.hidden.shape[dim]
    found: dict[str, int] = {}
    for name, tensor in _named_tensors(request):
        if dim_of_samples(tensor, size, dim) is not None:
            found[name] = 0
        elif tensor.ndim > 2 and tensor.shape[0] > size and tensor.shape[0] % size == 0:
            found[name] = tensor.shape[0] // size
    return found


def listed_arguments(request: Request, dim: int) -> list[str]:
    """The names of arguments that are lists with a number for each of the batch's samples."""
    size = request.hidden.shape[dim]
    named = (pair for call in request.surroundings.calls for pair in call.named_lists())
    return list(dict.fromkeys(name for name, numbers in named if len(numbers) == size))


def how_cut(request: Request, dim: int, rows: Rows = _ONE_EACH) -> tuple[int | None, ...]:
    """For each tensor besides the hidden states, the dimension along which it is cut."""
    cutting = _Cutting.of(request, dim, rows)
    found: list[int | None] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(cutting.along(tensor))
        return tensor

    def note_operand(tensor: Tensor) -> Tensor:
        found.append(dim if _operand_has_samples(tensor, cutting.size, dim) else None)
        return tensor

    for call in request.surroundings.calls:
        call.with_tensors(note, note_operand)
    for tensor in request.surroundings.carried.values():
        note(tensor)
    return tuple(found)


def _operand_has_samples(tensor: Tensor, size: int, dim: int) -> bool:
    """Whether a tensor with as many dimensions as the hidden states has their samples too."""
    return tensor.ndim > dim and tensor.shape[dim] == size


def dim_of_samples(tensor: Tensor, size: int, dim: int) -> int | None:
    """The dimension of samples in an argument; None without samples.

    It is ``dim`` if the argument has positions and features too, and otherwise the first one.
    """
    if dim and tensor.ndim > dim + 1 and tensor.shape[dim] == size:
        return dim
    return 0 if _has_rows(tensor, size) else None


def _has_rows(tensor: Tensor, count: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == count


def _check_clear(name: str, tensor: Tensor, hidden: Tensor) -> None:
    """Refuse an argument if its rows may be samples or positions: there are as many of both."""
    size, length = hidden.shape[0], hidden.shape[1] if hidden.ndim > 1 else 0
    if size == length and 1 <= tensor.ndim <= 2 and tensor.shape[0] == size:
        raise BatchError(
            f"The argument {name} of a layer has the shape {tuple(tensor.shape)}: it may have one "
            f"row per sample or one per position, because the batch has {size} samples of length "
            f"{length}. Use another batch size."
        )


@dataclass
class LoneMicrobatch:
    """A micro-batch that runs alone: it computes the same as in its step, in the modes of its calls
    and with the random numbers of its place. It leaves the stages unchanged, and has no backward.

    Args:
        index: Its number in the step.
        draws: The random numbers of its code in this process.
        run: How often the micro-batches of the step have run alone, this time included.
        stays: Whether this process runs its layers in the step; here workers do.
    """

    index: int
    draws: MicrobatchDraws
    run: int = 1
    stays: bool = False
    _num_visits: int = 0

    def exchange(self, stages: Stages, request: Request) -> Activation:
        """Send hidden states through the stages; returns the resulting activation."""
        # The stages draw by the visit in the step, and this number is unique among visits.
        key = Key(self.index, (1 + self.run) * FIRST_TRIAL + self._num_visits)
        self._num_visits += 1
        around = replace(request.surroundings, is_trial=True, keeps_modes=True, grad_enabled=False)
        stages.send_forward(key, request.hidden.detach(), around, is_whole=self.stays)
        found = received(stages, key)
        found.land()
        self.draws.note_hand_over(last_decoder_layer(call.layer_index for call in around.calls))
        self.draws.go_on()
        device = request.hidden.device

        def bring(tensor: Tensor) -> Tensor:
            return tensor.to(device)

        return found.map(bring)


def received(stages: Stages, key: Key) -> Activation:
    """Wait for the activation of a trial, and drop left-over returns of another trial."""
    while True:
        # A failed trial may have left others under way.
        returned = stages.receive()
        if returned.key == key and isinstance(returned.content, Activation):
            return returned.content

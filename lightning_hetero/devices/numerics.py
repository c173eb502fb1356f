"""The settings of torch with an effect on numbers: workers take them over.

torch keeps them for the whole process. Lightning advises `torch.set_float32_matmul_precision` on
GPUs, and ``Trainer(deterministic=True)`` sets another. A model may change the kernels of attention
within its forward (`torch.nn.attention.sdpa_kernel`), so they travel with each micro-batch.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch

from ..errors import ModelError
from ..protocol.fields import Numerics

# cuBLAS computes deterministically only with this value; torch reads it at the first product.
_CUBLAS_WORKSPACE = ":4096:8"

# The attributes of torch, by their names in `Numerics`.
_SWITCHES: dict[str, tuple[Any, str]] = {
    "cudnn": (torch.backends.cudnn, "enabled"),
    "cudnn_benchmark": (torch.backends.cudnn, "benchmark"),
    "cudnn_deterministic": (torch.backends.cudnn, "deterministic"),
    "onednn": (torch.backends.mkldnn, "enabled"),
    "onednn_deterministic": (torch.backends.mkldnn, "deterministic"),
    "float16_accumulation": (torch.backends.cuda.matmul, "allow_fp16_accumulation"),
}
_CUDNN: Any = torch.backends.cudnn
_MKLDNN: Any = torch.backends.mkldnn
_NEWER_BACKENDS = torch.backends.cuda.matmul, _MKLDNN.matmul
_OTHER_BACKENDS = _CUDNN.conv, _MKLDNN.conv, _MKLDNN.rnn
_PRECISION = attrgetter("fp32_precision")
_OWNERS_AND_NAMES = [*zip(*_SWITCHES.values(), strict=True)]
_SUMS = {
    "float16": "allow_fp16_reduced_precision_reduction",
    "bfloat16": "allow_bf16_reduced_precision_reduction",
}


def prepare_process() -> None:
    """Let a worker's process compute deterministically later, if a coordinator wants it, and let
    its forked processes use CUDA: a look for GPUs must not begin to use them.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def numerics_here() -> Numerics:
    """The present settings of this process."""
    cuda = torch.backends.cuda
    return Numerics(
        _matmul_precision(),
        _joined(_OTHER_BACKENDS),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        half_math_attention=cuda.fp16_bf16_reduction_math_sdp_allowed(),
        fast_encoder=torch.backends.mha.get_fastpath_enabled(),
        **_sums(),
        **dict(zip(_SWITCHES, map(getattr, *_OWNERS_AND_NAMES), strict=True)),
    )


def compute_with(numerics: Numerics) -> None:
    """Set the settings of this process, if they differ.

    Each call compares them, because code of layers may change them too.

    Raises:
        ModelError: If this torch does not know one of them.
    """
    here = numerics_here()
    if numerics == here:
        return
    if numerics.matmul_precision != here.matmul_precision:
        _set_matmul_precision(numerics.matmul_precision)
    if numerics.other_precisions != here.other_precisions:
        _set_precisions(_OTHER_BACKENDS, numerics.other_precisions)
    torch.use_deterministic_algorithms(numerics.deterministic, warn_only=numerics.only_warns)
    cuda = torch.backends.cuda
    cuda.enable_flash_sdp(numerics.flash_attention)
    cuda.enable_mem_efficient_sdp(numerics.memory_efficient_attention)
    cuda.enable_math_sdp(numerics.math_attention)
    cuda.enable_cudnn_sdp(numerics.cudnn_attention)
    cuda.allow_fp16_bf16_reduction_math_sdp(numerics.half_math_attention)
    torch.backends.mha.set_fastpath_enabled(numerics.fast_encoder)
    for field, (owner, name) in _SWITCHES.items():
        if getattr(numerics, field) != getattr(here, field):
            setattr(owner, name, getattr(numerics, field))
    for dtype, name in _SUMS.items():
        is_reduced = getattr(numerics, f"{dtype}_reduced_sums")
        is_split = getattr(numerics, f"{dtype}_split_sums")
        # The pair is newer than torch 2.9.
        setattr(cuda.matmul, name, is_reduced if is_split else (is_reduced, False))
    _check(numerics)


@contextlib.contextmanager
def making(dtype: torch.dtype) -> Iterator[None]:
    """Inside, this is torch's default dtype for new tensors.

    Keep it short: a new state of an optimizer would have the dtype too.
    """
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _check(wanted: Numerics) -> None:
    """Check the settings: torch only warns of unknown words, and older versions know fewer
    settings.

    Raises:
        ModelError: If a setting is not as wanted.
    """
    here = numerics_here()
    for field in wanted.__struct_fields__:
        if getattr(here, field) != getattr(wanted, field):
            raise ModelError(
                f"PyTorch {torch.__version__} does not take the coordinator's setting {field} = "
                f"{getattr(wanted, field)!r} over, and would compute other numbers; use the same "
                "version of torch here and there, or the default of this setting there."
            )


def _sums() -> dict[str, bool]:
    matmul = torch.backends.cuda.matmul
    found = {}
    for dtype, name in _SUMS.items():
        is_reduced = getattr(matmul, name)
        found[f"{dtype}_reduced_sums"] = is_reduced
        # torch takes False only where sums are not reduced either.
        found[f"{dtype}_split_sums"] = is_reduced or getattr(matmul, f"{name}_split_k", True)
    return found


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # The newer setting is in use.
        return _joined(_NEWER_BACKENDS)


def _set_matmul_precision(wanted: str) -> None:
    if "/" in wanted:
        _set_precisions(_NEWER_BACKENDS, wanted)
        return
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision(wanted)


def _set_precisions(backends: tuple[Any, ...], wanted: str) -> None:
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for backend, word in zip(backends, wanted.split("/"), strict=False):
            backend.fp32_precision = word


def _joined(backends: tuple[Any, ...]) -> str:
    return "/".join(map(_PRECISION, backends))

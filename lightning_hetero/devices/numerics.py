"""How torch computes in this process, by settings that change numbers: workers take them over.

torch keeps them for the whole process. Lightning advises `torch.set_float32_matmul_precision` on
GPUs, and ``Trainer(deterministic=True)`` sets another. A model may change the kernels of attention
within its forward (`torch.nn.attention.sdpa_kernel`), so they travel with each micro-batch.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import torch

from ..errors import ModelError
from ..protocol.fields import Numerics

# cuBLAS computes deterministically only with this, which torch reads at the first product.
_CUBLAS_WORKSPACE = ":4096:8"


def prepare_process() -> None:
    """Let a worker's process compute deterministically later, if a coordinator wants that, and
    let processes that it forks use CUDA: a look for GPUs must not begin to use them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS_WORKSPACE)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def numerics_here() -> Numerics:
    """The present settings of this process."""
    cuda = torch.backends.cuda
    return Numerics(
        _matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def compute_with(numerics: Numerics) -> None:
    """Set the settings of this process, if they differ.

    Raises:
        ModelError: If this torch does not know the precision.
    """
    here = numerics_here()
    if numerics == here:
        return
    if numerics.matmul_precision != here.matmul_precision:
        _set_matmul_precision(numerics.matmul_precision)
    torch.use_deterministic_algorithms(numerics.deterministic, warn_only=numerics.only_warns)
    cuda = torch.backends.cuda
    cuda.enable_flash_sdp(numerics.flash_attention)
    cuda.enable_mem_efficient_sdp(numerics.memory_efficient_attention)
    cuda.enable_math_sdp(numerics.math_attention)
    cuda.enable_cudnn_sdp(numerics.cudnn_attention)


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # The newer setting is in use. It exists from torch 2.9 on.
        return "/".join(backend.fp32_precision for backend in _newer_backends())


def _set_matmul_precision(wanted: str) -> None:
    with contextlib.suppress(RuntimeError, AttributeError), warnings.catch_warnings():
        # torch only warns of words that it does not know.
        warnings.simplefilter("ignore")
        words = wanted.split("/")
        if len(words) == 1:
            torch.set_float32_matmul_precision(wanted)
        else:
            for backend, word in zip(_newer_backends(), words, strict=False):
                backend.fp32_precision = word
    if _matmul_precision() != wanted:
        raise ModelError(
            f"torch {torch.__version__} cannot multiply with the coordinator's precision "
            f"{wanted!r}; use the same version of torch there, or call "
            "`torch.set_float32_matmul_precision`."
        )


def _newer_backends() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]

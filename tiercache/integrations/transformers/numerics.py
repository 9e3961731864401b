"""Settings outside a model that can change the bits it computes: torch's version and settings, the processor, kernel libraries."""

from __future__ import annotations

import functools
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch
import transformers

_READ: Final = (
    "get_float32_matmul_precision", "get_default_dtype", "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "backends.fp32_precision", "backends.cuda.matmul.fp32_precision", "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction", "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.flash_sdp_enabled", "backends.cuda.mem_efficient_sdp_enabled", "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled", "backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
    "backends.cuda.preferred_blas_library", "backends.cuda.preferred_linalg_library", "backends.cuda.preferred_rocm_fa_library",
    "backends.cudnn.enabled", "backends.cudnn.benchmark", "backends.cudnn.deterministic", "backends.cudnn.allow_tf32",
    "backends.cudnn.fp32_precision", "backends.cudnn.conv.fp32_precision", "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.enabled", "backends.mkldnn.deterministic", "backends.mkldnn.allow_tf32", "backends.mkldnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision", "backends.mkldnn.conv.fp32_precision", "backends.mkldnn.rnn.fp32_precision",
    "backends.mha.get_fastpath_enabled", "backends.nnpack.enabled", "backends.opt_einsum.enabled", "backends.opt_einsum.strategy",
)  # fmt: skip
"""Dotted names under `torch`; functions are called without arguments. Names that a version of torch lacks are left out."""
_VARIABLES: Final = (
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "USE_HUB_KERNELS",
)  # fmt: skip
"""Environment variables that choose kernels or precisions."""
_KERNELS: Final = (
    "flash-attn", "flash-linear-attention", "fla-core", "mamba-ssm", "causal-conv1d", "kernels", "triton", "xformers", "torchao",
    "bitsandbytes",
)  # fmt: skip
"""Packages that transformers, where they are installed, calls instead of its own code."""


def numerics(device: torch.device) -> dict[str, str]:
    """Return the settings, as texts by name, that can change what the calling thread computes on `device`.

    This takes a few dozen reads, some 200 microseconds. The number of threads is not among the settings: with another number sums may round
    differently, but a cache from before the change is as good as one from after it.
    """
    found = dict(_installed(device))
    for name in _READ:
        value = _read(name)
        if value is not None:
            found[f"torch.{name}"] = value
    kind = device.type
    found["torch.autocast"] = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
    found["torch.set_flush_denormal"] = str(bool(_DENORMAL.mul(1.0).item() == 0.0))
    found |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return found


_DENORMAL: Final = torch.tensor([5e-324], dtype=torch.float64)
"""The smallest positive float64; multiplied by 1 it becomes 0 where denormals are flushed."""


def _read(name: str) -> str | None:
    """Return a setting of torch as text; None if this version of torch lacks it, an error's type if torch refuses to read it."""
    value: Any = torch
    try:
        for part in name.split("."):
            value = getattr(value, part)
        return str(value() if callable(value) else value)
    except AttributeError:
        return None
    except RuntimeError as error:  # torch refuses to read a setting that was set in two ways
        return type(error).__name__


@functools.cache
def _installed(device: torch.device) -> tuple[tuple[str, str], ...]:
    """Return the versions and the hardware, which do not change within a process."""
    found = {"torch": torch.__version__, "transformers": transformers.__version__, "device": device.type}
    if device.type == "cuda":
        found["card"] = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    else:
        found["processor"] = torch.backends.cpu.get_cpu_capability()
    for package in _KERNELS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return tuple(found.items())

"""What outside a model can change the bits that it computes: torch's version and settings, the processor, libraries with kernels."""

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
"""Dotted names under `torch`; functions without arguments are called. What a version of torch lacks is left out."""
_VARIABLES: Final = (
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "USE_HUB_KERNELS",
)  # fmt: skip
_KERNELS: Final = (
    "flash-attn", "flash-linear-attention", "fla-core", "mamba-ssm", "causal-conv1d", "kernels", "triton", "xformers", "torchao",
    "bitsandbytes",
)  # fmt: skip
"""Packages that transformers calls instead of its own code where they are installed."""


def numerics(device: torch.device) -> dict[str, str]:
    """Settings by name, as texts, that can change what the thread computes on `device`. A few dozen reads: some 200 microseconds.

    The number of threads is not among them: with another number, sums may round differently, and a cache from before is as good as one
    from after.
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


def _read(name: str) -> str | None:
    value: Any = torch
    try:
        for part in name.split("."):
            value = getattr(value, part)
        return str(value() if callable(value) else value)
    except AttributeError:
        return None
    except RuntimeError as error:  # two ways to set one thing, used together
        return type(error).__name__


@functools.cache
def _installed(device: torch.device) -> tuple[tuple[str, str], ...]:
    """What does not change in a process."""
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

"""Detection of changes to a model, or to a setting that affects its results, after a cache was bound to it.

The check runs before every request and every commit; it takes some milliseconds for a model of some hundred
modules. It compares:

- the objects in every attribute,
- the version and the address of every tensor,
- a sample of each tensor's bytes.

If one of these differs, all values are compared before the model counts as changed, because a model may write
a value that is equal to the old one.

Torch does not count writes through `.data` or NumPy. If such a write changes only a few elements of a large
tensor, and none that is sampled, it is not detected. Reading all weights before every request would cost
about as much as generating a token.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from operator import is_
from typing import Any, Final

import torch
import transformers
from blake3 import blake3
from transformers import PreTrainedModel

from tiercache.core import PoolName
from tiercache.errors import ConfigError, UnsupportedModelError
from tiercache.integrations.transformers.fingerprint import Facts
from tiercache.integrations.transformers.runner import ModelRunner
from tiercache.keys import Identity

WHOLE: Final = 8 << 10
"""Maximum bytes of a tensor that is sampled as a whole."""
SAMPLES: Final = 128
"""Approximate number of bytes, evenly spaced, in the sample of a larger tensor."""


class Watch:
    """Record of a model as it was at construction or at the last `settle`, for later comparison.

    With `contents=False`, the content of large weights is not read; the caller has named the weights in the
    identity. The watch still detects most changes of such weights, by their versions, addresses and samples.
    Raises UnsupportedModelError for weights that cannot be read.

    Thread safety: one owner thread, the one that computes.
    """

    def __init__(self, model: PreTrainedModel, *, contents: bool = True) -> None:
        self._model = model
        self._device = torch.device(model.device)
        self._contents = contents
        self._numerics = numerics(self._device)
        self._accept(Facts(model, contents=contents))

    def settle(self) -> None:
        """Accept the model as it is after its first forwards.

        A forward may add facts, such as a table that it computes once. Raises UnsupportedModelError if a
        forward changed a fact that was there before, because the new value could depend on the length of the
        sequence.
        """
        now = self._walk()
        if changed := self._changed(now, self._facts.values):
            raise UnsupportedModelError(
                f"{type(self._model).__name__} keeps something outside its cache: its {changed} changed while"
                " it computed; only models whose forward leaves them as they were are served"
            )
        self._accept(now)

    def check(self) -> None:
        """Raise ConfigError, naming the change, if the model or a numeric setting has changed.

        A change that was undone before the check does not count.
        """
        now = numerics(self._device)
        if now != self._numerics:
            name = next(name for name in now | self._numerics if now.get(name) != self._numerics.get(name))
            raise ConfigError(
                f"{name} was {self._numerics.get(name, 'not set')} when this worker was made and is"
                f" {now.get(name, 'not set')}, which may change what the model computes; set it back, or make"
                " a new worker"
            )
        versions = [_version(tensor) for tensor in self._facts.tensors.values()]
        # Identities are compared, which is fast: an equal object in another's place is compared below.
        same = all(len(a := read()) == len(b) and all(map(is_, a, b)) for read, b in self._facts.read)
        if same and versions == self._versions and self._same_samples():
            return
        facts = self._walk()
        changed = self._changed(facts, self._facts.values | facts.values)
        if not changed and not self._contents and not self._same_samples():
            changed = "large weights"
        if changed:
            raise ConfigError(
                f"the model's {changed} is not what it was when this worker was made, and the cache is bound"
                " to what it was; set it back, or make a new worker, which takes an identity of its own"
            )
        self._accept(facts)

    def bound(self, identity: Identity) -> Identity:
        """Return `identity` bound to everything watched.

        The new revision is a digest of the former revision, the watched facts and the numeric settings.
        """
        hasher = blake3(f"{identity.revision}\n{self._facts.digest()}".encode())
        for name, value in sorted(self._numerics.items()):
            hasher.update(f"\n{name}={value}".encode())
        return replace(identity, revision=hasher.hexdigest())

    def _walk(self) -> Facts:
        """Collect the present facts, without reading the content of tensors that cannot have changed."""
        known = {}
        if self._same_samples():
            known = {
                id(tensor): self._facts.digests[id(tensor)]
                for tensor, seen in zip(self._facts.tensors.values(), self._versions, strict=True)
                if id(tensor) in self._facts.digests and seen[0] >= 0 and seen == _version(tensor)
            }
        return Facts(self._model, contents=self._contents, known=known)

    def _changed(self, now: Facts, paths: Mapping[str, str]) -> str:
        """Return one of `paths` at which the facts differ now, or that of an unread tensor; empty if none."""
        before, values = self._facts.values, now.values
        if differ := sorted(path for path in paths if before.get(path) != values.get(path)):
            return differ[0]
        # Of a tensor without a digest, a new version or address is all that is known.
        versions = dict(zip(self._facts.tensors, self._versions, strict=True))
        unread = (path for path, tensor in now.tensors.items() if id(tensor) not in now.digests)
        return next((path for path in unread if versions.get(path) != _version(now.tensors[path])), "")

    def _accept(self, facts: Facts) -> None:
        self._facts = facts
        self._versions = [_version(tensor) for tensor in facts.tensors.values()]
        self._views = list(_views(facts.tensors))
        self._samples = self._sampled()

    def _same_samples(self) -> bool:
        now = self._sampled()
        return all(torch.equal(self._samples[device], sample) for device, sample in now.items())

    def _sampled(self) -> dict[torch.device, torch.Tensor]:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for view in self._views:
            by_device.setdefault(view.device, []).append(view)
        return {device: torch.cat(views) for device, views in by_device.items()}


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how often torch has seen the tensor written, and its address.

    The count is -1 for inference tensors, whose writes torch does not count.
    """
    return (-1 if tensor.is_inference() else tensor._version), tensor.data_ptr()


def _views(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield views of a few bytes of every tensor's memory, evenly spaced; a view shows later writes."""
    seen: set[int] = set()
    for tensor in tensors.values():
        storage: Any = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        # An odd step, so that the samples are not always the same byte of an element.
        step = storage.nbytes() // SAMPLES | 1
        yield raw if len(raw) <= WHOLE else raw[::step]


def identity_of(
    model: PreTrainedModel, runner: ModelRunner, page_size: int, watch: Watch | None = None
) -> Identity:
    """Return an identity that is equal only for models that compute the same bits.

    The revision of the identity covers everything that `Watch` compares. A model that was saved and loaded
    again, from any directory, keeps its identity. Another attention, adapter, rotary embedding, precision,
    processor, or version of torch or transformers gives another identity.
    """
    dtypes = {
        name: "+".join(sorted({s.dtype for s in g.segments})) for name, g in runner.layout.geometries.items()
    }
    plain = Identity(
        model=type(model).__name__,
        revision="",
        weights_dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=dtypes.get(PoolName.KV, ""),
        state_dtype=dtypes.get(PoolName.MAMBA, ""),
        page_size=page_size,
        quantization=str(getattr(model.config, "quantization_config", None) or ""),
    )
    return (watch or Watch(model)).bound(plain)


_READ: Final = (
    "get_float32_matmul_precision", "get_default_dtype", "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "backends.fp32_precision", "backends.cuda.matmul.fp32_precision", "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.flash_sdp_enabled", "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled", "backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
    "backends.cuda.preferred_blas_library", "backends.cuda.preferred_linalg_library",
    "backends.cuda.preferred_rocm_fa_library",
    "backends.cudnn.enabled", "backends.cudnn.benchmark", "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32",
    "backends.cudnn.fp32_precision", "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.enabled", "backends.mkldnn.deterministic", "backends.mkldnn.allow_tf32",
    "backends.mkldnn.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision", "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
    "backends.mha.get_fastpath_enabled", "backends.nnpack.enabled", "backends.opt_einsum.enabled",
    "backends.opt_einsum.strategy",
)  # fmt: skip
"""Dotted names of settings under `torch`; those that are functions are called without arguments.

Names that a version of torch lacks are left out.
"""
_VARIABLES: Final = (
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "USE_HUB_KERNELS",
)  # fmt: skip
"""Environment variables that choose kernels or precisions."""
_KERNELS: Final = (
    "flash-attn", "flash-linear-attention", "fla-core", "mamba-ssm", "causal-conv1d", "kernels", "triton",
    "xformers", "torchao",
    "bitsandbytes",
)  # fmt: skip
"""Packages that transformers calls instead of its own code if they are installed."""


def numerics(device: torch.device) -> dict[str, str]:
    """Return the settings that affect the results of the calling thread on `device`, as texts by name.

    Reading them takes some 200 microseconds. The number of threads is not among the settings. With another
    number of threads, sums may round differently, but a cache that was computed before such a change is as
    good as a cache that is computed afterwards.
    """
    found = dict(_installed(device))
    for name in _READ:
        value = _read(name)
        if value is not None:
            found[f"torch.{name}"] = value
    kind = device.type
    found["torch.autocast"] = (
        str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "off"
    )
    found["torch.set_flush_denormal"] = str(bool(_DENORMAL.mul(1.0).item() == 0.0))
    found |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return found


_DENORMAL: Final = torch.tensor([5e-324], dtype=torch.float64)
"""The smallest positive float64; multiplied by 1 it becomes 0 where denormals are flushed."""


def _read(name: str) -> str | None:
    """Return a setting of torch as text; None if this version of torch lacks it.

    If torch refuses to read the setting, return the type of the error.
    """
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

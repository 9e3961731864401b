"""The identity of the bytes in a worker's cache: a model as it computes now, on this device and with these settings."""

from __future__ import annotations

from transformers import PreTrainedModel

from tiercache.core import PoolName
from tiercache.integrations.transformers.runner import ModelRunner
from tiercache.integrations.transformers.watch import Watch
from tiercache.keys import Identity


def identity_of(model: PreTrainedModel, runner: ModelRunner, page_size: int, watch: Watch | None = None) -> Identity:
    """Return an identity that is equal only for models that compute the same bits; see `Watch` for what its revision covers.

    A model that was saved and loaded again, from any directory, keeps its identity. Another attention, adapter, rotary embedding,
    precision, processor, or version of torch or transformers gives another identity.
    """
    dtypes = {name: "+".join(sorted({s.dtype for s in g.segments})) for name, g in runner.layout.geometries.items()}
    plain = Identity(
        model=type(model).__name__,
        revision="",
        weights_dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=dtypes[PoolName.KV],
        state_dtype=dtypes.get(PoolName.MAMBA, ""),
        page_size=page_size,
        quantization=str(getattr(model.config, "quantization_config", None) or ""),
    )
    return (watch or Watch(model)).bound(plain)

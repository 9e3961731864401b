"""What the elements of a host pool are."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.runtime_context import get_model, get_spec

from tiercache.errors import ConfigError


def kv_dtype_of(pool: Any) -> str:
    """The dtype of an anchor pool's elements. Raises ConfigError where nobody tells.

    SGLang keeps both kinds of FP8 as plain bytes and does not write on the pool which it is: the server's configuration does. There "auto"
    is what the checkpoint says, so it means one thing for one revision. AMD cards have an E4M3 of their own under the same name.
    """
    if pool.dtype is not torch.uint8:
        return str(pool.dtype).removeprefix("torch.")
    try:
        told = [get_model().kv_cache_dtype, get_spec().speculative_draft_kv_cache_dtype]
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"the host pool holds plain bytes, and nothing says of which dtype ({error}); set kv_dtype") from error
    return f"uint8 of {told[0]}, draft {told[1]}, {'rocm' if torch.version.hip else 'cuda'}"

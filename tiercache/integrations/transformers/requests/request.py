"""Request of the reference worker: one prompt, and how it is to be answered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tiercache.integrations.transformers.requests.sampling import GREEDY, Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """One request of `Worker.serve_all`; the fields are those arguments of `Worker.serve`."""

    tokens: Any
    """The prompt: an array, a tensor or a list of token ids."""
    new_tokens: int
    """Maximum number of tokens of the answer."""
    stop: int | Iterable[int] = ()
    """Tokens behind which the answer ends early."""
    extra: bytes = b""
    """Bytes that stand for what else the cache of this request depends on; see `keys.sequence_extra`."""
    sampling: Sampling = GREEDY

"""Plan of one request of the reference worker: what it restores, where its prefill is cut, what it needs."""

from __future__ import annotations

from dataclasses import dataclass

from tiercache.index import Chunk
from tiercache.text import readable_size


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """How a request would be served now, as far as the index knows; depths are in tokens."""

    prompt_tokens: int
    chunks: tuple[Chunk, ...]
    """The forward passes of the prefill. They begin at the restored depth and end at the prompt's end."""
    pages: int
    """Page slots for the prompt and the answer; some of these pages may be on the device already."""
    states: int
    """State slots: for the restored state, for those of the prefill, and for those of the decoding."""
    page_bytes: int
    """Payload bytes of the page slots."""
    state_bytes: int
    """Payload bytes of the state slots."""

    @property
    def restored(self) -> int:
        """Depth up to which the prompt would be restored."""
        return self.chunks[0].start

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Depths at which the prefill would leave states."""
        return tuple(chunk.end for chunk in self.chunks if chunk.checkpoint)

    def __str__(self) -> str:
        cuts = ", ".join(f"{chunk.end}{' (state)' * chunk.checkpoint}" for chunk in self.chunks)
        states = f", states {self.states} ({readable_size(self.state_bytes)})" if self.states else ""
        return (
            f"{self.restored} of {self.prompt_tokens} tokens restored, the rest computed up to {cuts};"
            f" on the device: pages {self.pages} ({readable_size(self.page_bytes)}){states}"
        )

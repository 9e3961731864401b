"""An engine of one's own: one layer of attention, one recurrence, and a cache that outlives the process.

    python examples/own_engine.py file:///tmp/engine?capacity=64MiB    # computes everything
    python examples/own_engine.py file:///tmp/engine?capacity=64MiB    # restores most of it; same answers

The model is a toy, and everything around it is what an engine of any size does.
"""

import sys
from itertools import pairwise

import torch

from tiercache.controller import Admission, HybridCacheController
from tiercache.core import PoolName
from tiercache.errors import StorageError
from tiercache.keys import Identity
from tiercache.pools import DevicePool, HostArena
from tiercache.pools.device import page_geometry_of, state_geometry_of
from tiercache.storage.registry import open_backend

PAGE, WIDTH = 16, 32  # tokens of a page; numbers of a token's key, of its value, and of a state
PAGES, STATES = 64, 16


class Engine:
    """Owner of the device tensors, which the cache fills and reads; `store` is the URL of a store."""

    def __init__(self, store: str) -> None:
        torch.manual_seed(0)
        self.embedding, self.head = torch.randn(256, 2 * WIDTH), torch.randn(2 * WIDTH, 256)
        self.keys, self.values = torch.zeros(PAGES * PAGE, WIDTH), torch.zeros(PAGES * PAGE, WIDTH)
        self.states = torch.zeros(STATES, WIDTH)
        kv, recurrent = {(0, "k"): self.keys, (0, "v"): self.values}, {(1, "state"): self.states}
        self.controller = HybridCacheController(
            Identity("toy", "1", "float32", "float32", "float32", PAGE),
            {
                PoolName.KV: DevicePool.from_tensors(page_geometry_of(kv, PAGE), kv),
                PoolName.MAMBA: DevicePool.from_tensors(state_geometry_of(recurrent, PAGE), recurrent),
            },
            HostArena(16 << 20, block_bytes=4096),
            open_backend(store),
        )

    def serve(self, tokens: list[int]) -> tuple[int, int]:
        """Return how many tokens were restored, and the token that the model would say next."""
        admission = self.controller.admit(self.controller.lookup(tokens), states=4)
        admission.wait()
        restored, state = self.restored(admission)
        for begin, end in self.steps(admission, tokens):
            state = self.compute(admission, tokens[:end], begin, state)
        said = self.said(admission, tokens, state)
        self.controller.release(admission)
        return restored, said

    def restored(self, admission: Admission) -> tuple[int, torch.Tensor]:
        """Return how many tokens were restored, and the state behind them."""
        for layer in (0, 1):  # an engine calls this just before the layer reads what was restored
            admission.wait_layer(layer)
        if not admission.depth:
            return 0, torch.zeros(WIDTH)
        return admission.depth, self.states[admission.restored_states[PoolName.MAMBA]].clone()

    def steps(self, admission: Admission, tokens: list[int]) -> list[tuple[int, int]]:
        """Return what is to be computed, cut where the cache wants a state."""
        ends = list(dict.fromkeys([*admission.checkpoints, len(tokens)]))
        return list(pairwise([admission.depth, *ends]))

    def compute(
        self, admission: Admission, tokens: list[int], begin: int, state: torch.Tensor
    ) -> torch.Tensor:
        """Compute `tokens` from `begin` on, keep them, and return the state behind them."""
        for position in range(begin, len(tokens)):
            key, value = self.embedding[tokens[position]].split(WIDTH)
            row = admission.pages[PoolName.KV][position // PAGE] * PAGE + position % PAGE
            self.keys[row], self.values[row] = key, value
            state = 0.9 * state + key * value
        states = {}
        if len(tokens) % PAGE == 0:
            slots = admission.take_states()
            self.states[slots[PoolName.MAMBA]] = state
            states = {len(tokens): slots}
        self.controller.commit(admission, tokens, states)
        return state

    def said(self, admission: Admission, tokens: list[int], state: torch.Tensor) -> int:
        """Return the token that the model would say next."""
        table = torch.as_tensor(admission.pages[PoolName.KV])
        position = torch.arange(len(tokens))
        rows = table[position // PAGE] * PAGE + position % PAGE
        attended = torch.softmax(self.keys[rows] @ state, 0) @ self.values[rows]
        return int((torch.cat([attended, state]) @ self.head).argmax())

    def close(self) -> None:
        """Wait for what is still being written, and end."""
        try:
            self.controller.flush(30)
        except StorageError as error:
            print(f"not everything was stored: {error}")
        self.controller.close()


PROMPT = [n * n % 251 for n in range(200)]

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("give the URL of a store, such as file:///tmp/engine?capacity=64MiB")
    engine = Engine(sys.argv[1])
    for tokens in (PROMPT, PROMPT[:144] + [7] * 40):
        restored, said = engine.serve(tokens)
        print(f"{len(tokens)} tokens, {restored} restored; the next token is {said}")
    engine.close()

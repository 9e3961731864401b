"""One rank of a small tensor-parallel model, as a process: attention and a recurrent layer, both by heads.

`python -m tests.controller.ranks_model RANK SIZE FOLDER SCENARIO` serves prompts in lock step with the other
ranks, and writes what it has seen to FOLDER as JSON lines.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.controller.harness import KV, MAMBA, P, prompt
from tests.controller.ranks_rig import Ranked, serve
from tests.integrity import check_controller
from tiercache.controller import ControllerOptions, HybridCacheController
from tiercache.core import Tier
from tiercache.geometry import kv_geometry, state_geometry
from tiercache.integrations.torch_ranks import ranks_of
from tiercache.keys import Identity, Shard, layout_digest
from tiercache.pools import DevicePool, HostArena
from tiercache.storage.registry import open_backend

HEADS, DIM, VOCABULARY = 4, 4, 64
WIDTH = HEADS * DIM
SLOTS, PAGES = 16, 48
PROMPT = [token % VOCABULARY for token in prompt(1, 2, 3, 4, 5, 6)]


class Model:
    """The part of one rank: its heads of both layers, column-parallel in, row-parallel out."""

    def __init__(self, rank, size):
        random = torch.Generator().manual_seed(7)
        draw = lambda *shape: torch.randn(*shape, generator=random) / WIDTH**0.5  # noqa: E731
        mine = slice(rank * WIDTH // size, (rank + 1) * WIDTH // size)
        self.heads = HEADS // size
        self.embed = draw(VOCABULARY, WIDTH)
        self.inward = [[draw(WIDTH, WIDTH)[:, mine] for _ in range(3)] for _ in range(2)]
        self.outward = [draw(WIDTH, WIDTH)[mine] for _ in range(2)]

    def step(self, token, keys, values, state):
        """Compute one token: append to `keys` and `values`, change `state`; return the hidden vector."""
        hidden = self.embed[token]
        q, k, v = ((hidden @ weight).view(self.heads, DIM) for weight in self.inward[0])
        keys.append(k)
        values.append(v)
        scores = torch.einsum("hd,thd->ht", q, torch.stack(keys)).softmax(-1)
        mixed = torch.einsum("ht,thd->hd", scores, torch.stack(values))
        hidden = hidden + reduced(mixed.flatten() @ self.outward[0])
        q, k, v = ((hidden @ weight).view(self.heads, DIM) for weight in self.inward[1])
        state.mul_(0.9).add_(torch.einsum("hi,hj->hij", k, v))
        return hidden + reduced(torch.einsum("hi,hij->hj", q, state).flatten() @ self.outward[1])


def reduced(part):
    dist.all_reduce(part)
    return part


class ModelEngine:
    """Engine of one rank over the model. A token is a forward pass, so cuts do not change the bits."""

    layers = 2

    def __init__(self, rank, size, store, group, *, deadline):
        self.rank, self.size, self.model = rank, size, Model(rank, size)
        heads = HEADS // size
        geometries = {
            KV: kv_geometry([0], heads, DIM, "float32", P),
            MAMBA: state_geometry([(1, "ssm", (heads, DIM, DIM), "float32")], P),
        }
        self.kv = {(0, name): torch.zeros(PAGES * P, heads, DIM) for name in ("k", "v")}
        self.states = torch.zeros(SLOTS, heads, DIM, DIM)
        tensors = {KV: self.kv, MAMBA: {(1, "ssm"): self.states}}
        self.pools = {name: DevicePool.from_tensors(g, tensors[name]) for name, g in geometries.items()}
        self.store = store
        part = Shard(rank, size)
        self.controller = HybridCacheController(
            Identity("toy", "1", "float32", "float32", "float32", P), self.pools,
            HostArena(64 * 4096, 4096), self.store, shard={KV: part, MAMBA: part}, ranks=group,
            options=ControllerOptions(restore_deadline=deadline, join_deadline=30.0),
        )  # fmt: skip
        self.last = None

    def admit(self, lookup, **need):
        return self.controller.admit(lookup, **need)

    def resume(self, admission, tokens, depth):
        """Continue at the restored depth: read KV and state out of the slots."""
        rows = [int(admission.pages[KV][at // P]) * P + at % P for at in range(depth)]
        self.keys, self.values = ([self.kv[0, name][row].clone() for row in rows] for name in ("k", "v"))
        self.live = (
            self.states[admission.restored_states[MAMBA]].clone()
            if depth
            else torch.zeros_like(self.states[0])
        )

    def compute(self, admission, tokens, start, end):
        for at in range(len(self.keys), end):
            self.last = self.model.step(int(tokens[at]), self.keys, self.values, self.live)
            row = int(admission.pages[KV][at // P]) * P + at % P
            self.kv[0, "k"][row], self.kv[0, "v"][row] = self.keys[at], self.values[at]

    def take_state(self, admission, tokens):
        slots = admission.take_states()
        self.states[slots[MAMBA]] = self.live
        return slots

    def end(self, admission, tokens):
        pass

    def plain(self, tokens):
        """The last hidden vector of `tokens`, computed without the cache."""
        keys, values, state = [], [], torch.zeros_like(self.states[0])
        for token in tokens:
            hidden = self.model.step(int(token), keys, values, state)
        return hidden

    def empty(self, *tiers):
        self.controller.flush(20)
        for tier in tiers:
            self.controller.evict(tier)

    def lose(self, pool, depth):
        """Lose one of this rank's own objects, behind the controller's back."""
        layout = layout_digest(pool, self.pools[pool].geometry.fingerprint, Shard(self.rank, self.size))
        found = [e.key for e in self.store.scan_all() if e.key.layout == layout and e.meta.depth == depth]
        assert found, f"there is no object of {pool} at depth {depth}"
        self.store.lost.update(found)
        self.store.delete(found)


def word(rank, *values):
    """Broadcast the values of rank 0 to all."""
    numbers = torch.zeros(16, dtype=torch.int64)
    if rank == 0:
        numbers[: len(values) + 1] = torch.tensor([len(values), *map(int, values)])
    dist.broadcast(numbers, 0)
    return numbers[1 : 1 + int(numbers[0])].tolist()


def begin_gloo(rank, size, folder, turn):
    # Loopback, whatever the host's name stands for; a collective with a dead rank ends after 20 s.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/gloo-{turn}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=20),
    )


class Log:
    def __init__(self, path):
        self.path = path

    def __call__(self, step, **seen):
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step} | seen) + "\n")


def check(engine, log, step, tokens=PROMPT):
    """Serve a prompt, and compare its bits with those that are computed without the cache."""
    depths = serve(engine, engine.rank, word, tokens)
    plain = engine.plain(tokens)
    same = bool(torch.equal(plain.view(torch.uint8), engine.last.view(torch.uint8)))
    log(step, depths=[depth // P for depth in depths], same=same)


def run_life(rank, size, folder, log):
    """Ranks that restore from each tier, and from a store with holes; then another number of ranks."""
    url = f"lmdb://{folder}/store?capacity=64MiB"
    begin_gloo(rank, size, folder, 0)
    engine = ModelEngine(rank, size, Ranked(open_backend(url), is_owned=True), ranks_of(), deadline=30.0)
    for pages in (3, 5, 6):
        check(engine, log, "cold", PROMPT[: pages * P])
    engine.empty()
    dist.barrier()
    for tiers in ((), (Tier.DEVICE,), (Tier.DEVICE, Tier.HOST)):
        engine.empty(*tiers)
        check(engine, log, "warm")
    engine.empty(Tier.DEVICE, Tier.HOST)
    if rank == size - 1:
        engine.lose(MAMBA, 5)
    if rank == 0:
        engine.lose(MAMBA, 4)
    check(engine, log, "holes")
    check_controller(engine.controller)
    log("closed", quiet=engine.controller.close())
    dist.barrier()
    if size == 4:  # the same store with half of the ranks: each pair of them is a group of its own
        dist.destroy_process_group()
        begin_gloo(rank % 2, 2, folder, 1 + rank // 2)
        engine = ModelEngine(rank % 2, 2, Ranked(open_backend(url), is_owned=True), ranks_of(), deadline=30.0)
        check(engine, log, "other size")
        engine.controller.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, count, where = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    run_life(place, count, where, Log(where / f"rank-{place}.jsonl"))

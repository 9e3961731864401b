"""Detects that a model, or a setting that affects how it is computed, is no longer what a cache was bound to.

The check runs before every request and before every commit; it takes some milliseconds for a model of some hundred modules. It compares
the objects in every attribute, the version and the address of every tensor, a sample of each tensor's bytes, and, in full, the next few
MiB of the weights, which are read in turn. A difference is looked at again before it counts, because a model may write equal values anew.

Writes that torch does not count (through `.data` or NumPy) to a few elements of a large tensor are detected only when its turn comes:
reading all weights before every request would cost about as much as generating a token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import is_
from typing import Any, Final

import torch
from blake3 import blake3
from transformers import PreTrainedModel

from tiercache.errors import ConfigError, UnsupportedModelError
from tiercache.integrations.transformers.fingerprint import CHUNK, Facts, chunks, content_of, digest_of
from tiercache.integrations.transformers.numerics import numerics
from tiercache.keys import Identity

WHOLE: Final = 8 << 10
"""Bytes of the largest tensor memory that is compared as a whole."""
SAMPLES: Final = 128
"""Number of bytes, about, that are compared of a larger one, evenly spread."""


class Watch:
    """A record of what one model was at construction or at the last `settle`, to compare the model with.

    With `contents=False` large weights are not read: the caller vouches for them, and only changes are looked for. Raises
    UnsupportedModelError for weights that cannot be read.

    Thread safety: one owner thread, the one that computes.
    """

    def __init__(self, model: PreTrainedModel, *, contents: bool = True) -> None:
        self._model = model
        self._device = torch.device(model.device)
        self._contents = contents
        self._numerics = numerics(self._device)
        self._turn = 0
        self._suspect = False
        self._accept(Facts(model, contents=contents))

    def settle(self) -> None:
        """Accept the model as it is after its first forwards.

        A forward may add facts, such as a table that it makes once. Raises UnsupportedModelError if it changed a fact that was there
        before, because the new value could depend on the length of the sequence.
        """
        before, now = self._facts.values, self._walk()
        changed = [path for path, value in before.items() if now.values.get(path) != value] or self._rewritten(now)
        if changed:
            raise UnsupportedModelError(
                f"{type(self._model).__name__} keeps something outside its cache: its {changed[0]} changed while it computed; only models "
                "whose forward leaves them as they were are served"
            )
        self._accept(now)

    def check(self) -> None:
        """Raise ConfigError, naming what changed, if the model or the numeric settings are not what they were.

        A change that was set back does not count.
        """
        now = numerics(self._device)
        if now != self._numerics:
            name = next(name for name in now | self._numerics if now.get(name) != self._numerics.get(name))
            raise ConfigError(
                f"{name} was {self._numerics.get(name, 'not set')} when this worker was made and is {now.get(name, 'not set')}, which may "
                "change what the model computes; set it back, or make a new worker"
            )
        if not (self._same_objects() and self._same_tensors() and self._same_samples()):
            self._look_again(self._walk())
        if self._suspect or not self._same_chunks():
            self._suspect = True  # until a full read finds no change: the chunk that differs had its turn, so the next check would miss it
            self._look_again(Facts(self._model, contents=self._contents))

    def _look_again(self, facts: Facts) -> None:
        """Raise ConfigError unless `facts`, read after something was replaced or written, equal the facts so far; then accept them."""
        before, values = self._facts.values, facts.values
        changed = sorted(path for path in before | values if before.get(path) != values.get(path)) or self._rewritten(facts)
        if not changed and not self._contents and not self._same_samples():
            changed = ["large weights"]
        if changed:
            raise ConfigError(
                f"the model's {changed[0]} is not what it was when this worker was made, and the cache is bound to what it was; set it "
                "back, or make a new worker, which takes an identity of its own"
            )
        self._accept(facts)

    def bound(self, identity: Identity) -> Identity:
        """Return `identity` bound to everything watched: its new revision is a digest of that and of its former revision."""
        hasher = blake3(f"{identity.revision}\n{self._facts.digest()}".encode())
        for name, value in sorted(self._numerics.items()):
            hasher.update(f"\n{name}={value}".encode())
        return replace(identity, revision=hasher.hexdigest())

    def _walk(self) -> Facts:
        """Collect the facts as they are now, without reading tensors that cannot have changed."""
        known = {}
        if self._same_samples():
            known = {
                id(tensor): self._facts.digests[id(tensor)]
                for (_, tensor), seen in zip(self._tensors, self._versions, strict=True)
                if id(tensor) in self._facts.digests and seen[0] >= 0 and seen == _version(tensor)
            }
        return Facts(self._model, contents=self._contents, known=known)

    def _accept(self, facts: Facts) -> None:
        self._facts = facts
        self._tensors = [(path, tensor) for path, tensor in facts.tensors.items()]
        self._versions = [_version(tensor) for tensor in facts.tensors.values()]
        self._views = list(_views(facts.tensors))
        self._samples = self._sampled()
        self._turns = [(tensor, n) for tensor in facts.tensors.values() for n in range(len(facts.digests.get(id(tensor), ())))]
        self._suspect = False

    def _same_objects(self) -> bool:
        """Return whether every attribute and every item is still the same object."""
        for mapping, keys, values in self._facts.mappings:
            if len(mapping) != len(values) or not all(map(is_, mapping.values(), values)) or not all(map(is_, keys, mapping)):
                return False
        for held, items in self._facts.sequences:
            if len(held) != len(items) or (held != items if isinstance(held, set) else not all(map(is_, held, items))):
                return False
        return all(getattr(kind, "forward", None) is forward for kind, forward in self._facts.classes.items()) and all(
            table.get(name) is function for table, name, function in self._facts.interfaces
        )

    def _same_tensors(self) -> bool:
        """Return whether every tensor is at its former address with its former content.

        A tensor that was written is read again; equal content is no change.
        """
        for n, (path, tensor) in enumerate(self._tensors):
            if (now := _version(tensor)) == self._versions[n]:
                continue
            if now[1] != self._versions[n][1] or self._facts.digests.get(id(tensor)) != content_of(tensor, path):
                return False
            self._versions[n] = now
        return True

    def _same_samples(self) -> bool:
        now = self._sampled()
        return all(torch.equal(self._samples[device], sample) for device, sample in now.items())

    def _sampled(self) -> dict[torch.device, torch.Tensor]:
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for view in self._views:
            by_device.setdefault(view.device, []).append(view)
        return {device: torch.cat(views) for device, views in by_device.items()}

    def _same_chunks(self) -> bool:
        """Return whether the next chunks in turn, `CHUNK` bytes or a little more, have their former content."""
        left = CHUNK
        for _ in self._turns:
            self._turn = (self._turn + 1) % len(self._turns)
            tensor, n = self._turns[self._turn]
            chunk = next(itertools.islice(chunks(tensor), n, None))
            if digest_of(chunk) != self._facts.digests[id(tensor)][n]:
                return False
            left -= chunk.numel() * chunk.element_size()
            if left <= 0:
                break
        return True

    def _rewritten(self, facts: Facts) -> list[str]:
        """Return the paths of tensors whose content was not read and that were written or replaced."""
        versions = {path: version for (path, _), version in zip(self._tensors, self._versions, strict=True)}
        return [p for p, tensor in facts.tensors.items() if id(tensor) not in facts.digests and versions.get(p) != _version(tensor)]


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Return how often torch has seen a tensor written (-1 for inference tensors, which it does not count), and its address."""
    return (-1 if tensor.is_inference() else tensor._version), tensor.data_ptr()


def _views(tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield views of a few bytes of every tensor's memory, evenly spread; views show later writes."""
    seen: set[int] = set()
    for tensor in tensors.values():
        storage: Any = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        step = storage.nbytes() // SAMPLES | 1  # odd, so that the samples are not always the same byte of an element
        yield raw if len(raw) <= WHOLE else raw[::step]

"""NumPy arrays that answer what a pool asks of a torch tensor: the pools need no torch, and neither do most
of their tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiercache.pools.device import Tensors

STORAGE = {"float32": np.uint32, "bfloat16": np.uint16, "uint8": np.uint8, "float8_e4m3fn": np.uint8}


@dataclass
class ArrayTensor:
    array: npt.NDArray[np.generic]
    dtype: str
    device: str = "cpu"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    def __getitem__(self, index: object) -> ArrayTensor:
        return ArrayTensor(self.array[index], self.dtype, self.device)

    def __len__(self) -> int:
        return len(self.array)


def random_tensor(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, *, gap: int = 0
) -> ArrayTensor:
    """Random bytes; with `gap`, as many more elements lie between two entries of the first dimension."""
    storage = np.dtype(STORAGE[dtype])
    inner = np.empty(shape[1:], storage)
    raw = rng.integers(0, 256, (shape[0], inner.nbytes + gap * storage.itemsize), np.uint8)
    return ArrayTensor(np.ndarray(shape, storage, raw, strides=(raw.strides[0], *inner.strides)), dtype)


@dataclass
class Twin:
    """A copy of all the memory under some tensors, gaps and neighbours included, and each tensor's view over
    the copy.
    """

    owners: list[tuple[npt.NDArray[np.generic], bytearray]]
    views: list[npt.NDArray[np.generic]]

    @classmethod
    def of(cls, tensors: Tensors) -> Twin:
        copies: dict[int, tuple[npt.NDArray[np.generic], bytearray]] = {}
        views = []
        for tensor in tensors.values():
            assert isinstance(tensor, ArrayTensor)
            owner = tensor.array
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            _, memory = copies.setdefault(id(owner), (owner, bytearray(owner.tobytes())))
            offset = tensor.data_ptr() - owner.ctypes.data
            views.append(np.ndarray(tensor.shape, tensor.array.dtype, memory, offset, tensor.array.strides))
        return cls(list(copies.values()), views)

    def move(self, slots: int, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Copy whole slots within the copy, by plain indexing."""
        for view in self.views:
            rows = len(view) // slots
            to = (targets[:, None] * rows + np.arange(rows)).reshape(-1)
            view[to] = view[(sources[:, None] * rows + np.arange(rows)).reshape(-1)]

    def agrees(self) -> bool:
        return all(owner.tobytes() == memory for owner, memory in self.owners)


def slot_bytes(tensors: Tensors, slots: int, slot: int) -> bytes:
    """Read the object of `slot`, segment by segment in the mapping's order, by plain indexing."""
    parts = []
    for tensor in tensors.values():
        assert isinstance(tensor, ArrayTensor)
        rows = len(tensor) // slots
        parts.append(tensor.array[slot * rows : (slot + 1) * rows].tobytes())
    return b"".join(parts)

"""NumPy arrays that answer what a pool asks of a torch tensor, so that most tests need no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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

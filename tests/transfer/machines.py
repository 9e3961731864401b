"""Machines on which the CUDA engine is tested, behind one interface.

A simulated device is there on every machine; a real one is used where there is one (`pytest -m gpu`). The
streams of a machine stand for the engine's own: `sleep` is a slow kernel, `write` a kernel that writes a
tensor, `read` one that copies it out. All three run when the stream reaches them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.pools.tensors import STORAGE, ArrayTensor
from tests.transfer.simulated_cuda import SimulatedDevice
from tiercache.core import PoolName
from tiercache.pools import DevicePool, HostPool
from tiercache.transfer.cuda import CudaEngine, Method
from tiercache.transfer.descriptors import Descriptors

Bytes = npt.NDArray[np.uint8]


class Stream(ABC):
    handle: int

    @abstractmethod
    def sleep(self, seconds: float) -> None: ...
    @abstractmethod
    def write(self, tensor: Any, first: int, content: Bytes) -> None:
        """Bytes into the rows from `first` on."""

    @abstractmethod
    def read(self, tensor: Any) -> Callable[[], Bytes]:
        """All bytes, as they are when the stream comes to it; the result waits for that."""

    @abstractmethod
    def event(self) -> Any: ...


class Machine(ABC):
    """One device."""

    patience = 10.0
    late = 0.1
    """Seconds of a kernel that is too slow for whoever does not wait."""

    @abstractmethod
    def tensor(self, content: Bytes, shape: tuple[int, ...], dtype: str) -> Any:
        """A new tensor of these bytes, in device memory."""

    @abstractmethod
    def content(self, tensor: Any) -> Bytes:
        """Its bytes now, whatever is under way."""

    @abstractmethod
    def stream(self) -> Stream: ...
    @abstractmethod
    def engine(
        self, devices: Mapping[PoolName, DevicePool], hosts: Mapping[PoolName, HostPool], **settings: Any
    ) -> CudaEngine: ...


class SimulatedStream(Stream):
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        with device.current():
            self.handle = device.create_stream(urgent=False)

    def sleep(self, seconds: float) -> None:
        self._device.run(self.handle, lambda: time.sleep(seconds))

    def write(self, tensor: Any, first: int, content: Bytes) -> None:
        target = as_bytes(tensor.array)
        start = first * (target.nbytes // len(tensor.array))
        self._device.run(self.handle, lambda: np.copyto(target[start : start + len(content)], content))

    def read(self, tensor: Any) -> Callable[[], Bytes]:
        target, found = as_bytes(tensor.array), []
        self._device.run(self.handle, lambda: found.append(target.copy()))
        event = self.event()

        def result() -> Bytes:
            event.synchronize()
            return found[0]

        return result

    def event(self) -> Any:
        return self._device.event(self.handle)


class Simulated(Machine):
    def __init__(self, **settings: Any) -> None:
        self.device = SimulatedDevice(**settings)

    def tensor(self, content: Bytes, shape: tuple[int, ...], dtype: str) -> ArrayTensor:
        array = np.empty(shape, STORAGE[dtype])
        as_bytes(array)[:] = content
        return ArrayTensor(self.device.adopt(array), dtype, f"cuda:{self.device.ordinal}")

    def content(self, tensor: Any) -> Bytes:
        return as_bytes(tensor.array).copy()

    def stream(self) -> Stream:
        return SimulatedStream(self.device)

    def engine(
        self, devices: Mapping[PoolName, DevicePool], hosts: Mapping[PoolName, HostPool], **settings: Any
    ) -> CudaEngine:
        settings.setdefault("group_bytes", 1)  # layers are small here, and each shall be waited for by itself
        settings.setdefault("choose", always(settings.pop("method", None)))
        return CudaEngine(devices, hosts, device=self.device, **settings)


class RealStream(Stream):
    """Memory is made ready in this stream, for an allocation may wait for a kernel, and hide a race."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._stream = torch.cuda.Stream()
        self.handle = self._stream.cuda_stream
        with torch.cuda.stream(self._stream):
            ready = [
                torch.empty(size, dtype=torch.uint8, device="cuda:0") for size in (1 << 10, 1 << 20, 16 << 20)
            ]
            ready += [
                torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in (1 << 10, 1 << 16, 1 << 20)
            ]
            del ready
        torch.cuda.synchronize()

    def sleep(self, seconds: float) -> None:
        with self._torch.cuda.stream(self._stream):
            # private: torch has no other way to keep a stream busy. In cycles; the clock is near 2 GHz
            self._torch.cuda._sleep(int(seconds * 2e9))

    def write(self, tensor: Any, first: int, content: Bytes) -> None:
        target = tensor.view(self._torch.uint8).reshape(-1)
        start = first * (target.numel() // len(tensor))
        with self._torch.cuda.stream(self._stream):
            target[start : start + len(content)].copy_(
                self._torch.from_numpy(content).pin_memory(), non_blocking=True
            )

    def read(self, tensor: Any) -> Callable[[], Bytes]:
        with self._torch.cuda.stream(self._stream):
            copy = tensor.view(self._torch.uint8).reshape(-1).clone()
        event = self.event()

        def result() -> Bytes:
            event.synchronize()
            found: Bytes = copy.cpu().numpy()
            return found

        return result

    def event(self) -> Any:
        return self._stream.record_event()


class Real(Machine):
    """Device 0 of this process."""

    patience = 60.0
    late = 0.3

    def __init__(self) -> None:
        torch = pytest.importorskip("torch", reason="torch is not installed")
        pytest.importorskip("cupy", reason="CuPy is not installed: pip install 'tiercache-hybrid[cuda]'")
        if not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")
        self._torch = torch

    def tensor(self, content: Bytes, shape: tuple[int, ...], dtype: str) -> Any:
        raw = self._torch.from_numpy(content.copy()).to("cuda:0")
        self._torch.cuda.synchronize()  # other streams do not wait for the default one
        return raw.view(getattr(self._torch, dtype)).reshape(shape)

    def content(self, tensor: Any) -> Bytes:
        self._torch.cuda.synchronize()
        found: Bytes = tensor.contiguous().view(self._torch.uint8).reshape(-1).cpu().numpy()
        return found

    def stream(self) -> Stream:
        return RealStream()

    def engine(
        self, devices: Mapping[PoolName, DevicePool], hosts: Mapping[PoolName, HostPool], **settings: Any
    ) -> CudaEngine:
        settings.setdefault("group_bytes", 1)
        settings.setdefault("choose", always(settings.pop("method", None)))
        return CudaEngine(devices, hosts, **settings)


def always(method: Method | None) -> Callable[[Descriptors], Method]:
    """A choice of one method for all copies; None: another one for each size."""
    return lambda copies: list(Method)[int(copies.nbytes).bit_length() % 3] if method is None else method


def as_bytes(array: npt.NDArray[Any]) -> Bytes:
    """A writable view of an array's bytes."""
    return array.reshape(-1).view(np.uint8)


def random_bytes(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Bytes:
    return rng.integers(0, 256, int(np.prod(shape)) * np.dtype(STORAGE[dtype]).itemsize, np.uint8)

"""A device's context through a stand-in driver of two devices, compiled against NVIDIA's header."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from tiercache_kernels.driver import CudaError, DeviceContext, Unavailable

from tests.kernels.toolkit import build, needs_nvcc, on_a_thread


@pytest.fixture
def driver(tmp_path: Path) -> ctypes.CDLL:
    """A stand-in for the driver, compiled anew for each test, because it counts its calls."""
    return ctypes.CDLL(str(build(tmp_path)))


@needs_nvcc
def test_it_is_entered_and_left_and_no_other_one_is_made(driver: ctypes.CDLL) -> None:
    context = DeviceContext(driver, 1)

    def work() -> list[object]:
        found = [driver.stand_in_get_device()]
        before = context.enter()
        found += [driver.stand_in_runtime_call(), driver.stand_in_relaxed()]
        context.leave(before)
        return [*found, driver.stand_in_get_device(), driver.stand_in_depth(), driver.stand_in_relaxed()]

    assert on_a_thread(work) == [0, 1, 1, 0, 0, 0]
    assert driver.stand_in_contexts(1) > 0
    assert driver.stand_in_contexts(0) == 0


@needs_nvcc
def test_the_stand_in_counts_what_a_driver_would_make(driver: ctypes.CDLL) -> None:
    def puts_back() -> None:
        before = driver.stand_in_get_device()
        driver.stand_in_set_device(1)
        driver.stand_in_set_device(before)

    on_a_thread(puts_back)
    assert driver.stand_in_contexts(0) == 1
    on_a_thread(driver.stand_in_runtime_call)
    assert driver.stand_in_contexts(0) == 2
    assert driver.stand_in_strict_calls() == 3


@needs_nvcc
def test_a_thread_is_relaxed_before_its_first_call_and_others_are_not(driver: ctypes.CDLL) -> None:
    context = on_a_thread(lambda: DeviceContext(driver, 0))
    assert on_a_thread(
        lambda: (context.enter(), driver.stand_in_runtime_call(), driver.stand_in_relaxed())[2]
    )
    assert not driver.stand_in_relaxed()
    assert driver.stand_in_strict_calls() == 0


@needs_nvcc
def test_a_mode_that_the_thread_has_chosen_comes_back(driver: ctypes.CDLL) -> None:
    context = DeviceContext(driver, 0)
    outer = context.enter()
    inner = context.enter()
    context.leave(inner)
    assert driver.stand_in_relaxed()
    context.leave(outer)
    assert not driver.stand_in_relaxed()


@needs_nvcc
def test_a_device_that_is_not_there_is_refused(driver: ctypes.CDLL) -> None:
    with pytest.raises(CudaError, match="cuDeviceGet failed"):
        DeviceContext(driver, 2)


@needs_nvcc
@pytest.mark.parametrize("same", [0, 1])
def test_by_which_address_a_device_knows_the_hosts_memory(same: int, tmp_path: Path) -> None:
    context = DeviceContext(ctypes.CDLL(str(build(tmp_path, f"SAME_ADDRESS={same}"))), 0)
    assert context.reads_host_addresses() == bool(same)


def test_no_driver() -> None:
    with pytest.raises(Unavailable, match="cannot be loaded"):
        DeviceContext.load(0, "libno-such-driver.so.1")
    with pytest.raises(Unavailable, match="does not export cuInit"):
        DeviceContext.load(0, "libc.so.6")

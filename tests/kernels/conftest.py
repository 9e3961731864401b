from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.toolkit import build


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("driver")


@pytest.fixture(scope="session")
def library(folder: Path) -> Path:
    return build(folder)

"""Supply of the image and the wheel: everything is pinned, has hashes, and is listed."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.base import DEPLOY, run, tool
from tiercache_distribution import DISTRIBUTION

ROOT = DEPLOY.parent
PINS_FILE = DEPLOY / "container/requirements.txt"
EXTRA = "http"
"""Extra of the image that serves; the others are installed by their versions."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def pins(text: str) -> dict[str, str]:
    """Names with versions, from lines `name==version`, with or without hashes and markers."""
    found = re.findall(r"(?m)^([\w.-]+)==([\w.+!-]+)", text)
    return {canonicalize_name(name): version for name, version in found}


PINS = pins(PINS_FILE.read_text())


def needed(name: str, extras: set[str], python: str, done: set[str]) -> Iterator[Requirement]:
    """Everything that a distribution requires with these extras under a Python, and what that requires."""
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        environment = {"python_version": python, "python_full_version": f"{python}.0"}
        marker = requirement.marker
        if marker and not any(marker.evaluate(environment | {"extra": extra}) for extra in extras or {""}):
            continue
        if canonicalize_name(requirement.name) != DISTRIBUTION:
            yield requirement
        key = f"{requirement.name}[{','.join(sorted(requirement.extras))}]"
        if key not in done:
            done.add(key)
            yield from needed(requirement.name, requirement.extras, python, done)


def test_every_pin_has_hashes_and_is_the_one_that_is_tested() -> None:
    lines = [line for line in PINS_FILE.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r" \\\n", "", "\n".join(lines)).splitlines()
    assert len(joined) == len(PINS) > 20
    for line in joined:
        assert re.fullmatch(r"[\w.-]+==[\w.]+(?: +; [^\\]+?)?(?: +--hash=sha256:[0-9a-f]{64})+", line), line[
            :80
        ]
    tested = pins((ROOT / "constraints-dev.txt").read_text())
    assert {name: tested.get(name) for name in PINS} == PINS


@pytest.mark.parametrize("python", PYTHONS)
def test_everything_that_the_image_installs_is_pinned(python: str) -> None:
    found = list(needed(DISTRIBUTION, {EXTRA, ""}, python, set()))
    assert {"aiohttp", "grpcio", "lmdb"} <= {requirement.name for requirement in found}
    for requirement in found:
        name = canonicalize_name(requirement.name)
        assert name in PINS, f"{name} is not pinned; run make pins"
        assert requirement.specifier.contains(PINS[name]), str(requirement)


def test_nothing_is_pinned_that_nothing_needs() -> None:
    found = [needed(DISTRIBUTION, {EXTRA, ""}, python, set()) for python in PYTHONS]
    assert {canonicalize_name(one.name) for each in found for one in each} == {*PINS}


def test_the_bill_of_materials_is_that_of_the_wheel(tmp_path: Path) -> None:
    """Made as `make sbom` does; the tool validates it against the schema of CycloneDX."""
    cyclonedx = tool("cyclonedx-py", "make test-deploy installs it")
    [recipe] = re.findall(
        r"(?m)^sbom:.*\n(?:\t.*\n)*?\t\$\(BIN\)/cyclonedx-py (.*)$", (ROOT / "Makefile").read_text()
    )
    *words, _ = recipe.split()
    run("env", "PYTHONWARNINGS=ignore", cyclonedx, *words, tmp_path / "bill.json", cwd=ROOT)
    bill = json.loads((tmp_path / "bill.json").read_text())
    wheel = importlib.metadata.metadata(DISTRIBUTION)
    described = bill["metadata"]["component"]
    assert (described["name"], described["version"]) == (wheel["Name"], wheel["Version"])
    assert described["licenses"][0]["license"]["id"] == wheel["License-Expression"]
    parts = {canonicalize_name(part["name"]): part for part in bill["components"]}
    assert {name: part["version"] for name, part in parts.items()} == PINS
    assert len(bill["components"]) == len(PINS)
    for part in parts.values():
        assert any(one["alg"] == "SHA-256" for place in part["externalReferences"] for one in place["hashes"])
    own = {canonicalize_name(Requirement(text).name) for text in wheel.get_all("Requires-Dist")
           if "extra" not in text}  # fmt: skip
    assert own <= {*parts}

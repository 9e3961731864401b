"""Name of the distribution: no text says to install another one, and another one that is there is named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tiercache_distribution import DISTRIBUTION, foreign_sentence

ROOT = Path(__file__).parents[1]
FOLDERS = (
    ".ci", "deploy", "docs", "examples", "kernels", "lab", "proto", "storage_backends", "tests", "tiercache",
)  # fmt: skip
COMMAND = re.compile(
    r"(?:(?:pip[0-9.]*|pipx|conda|tool) install|(?:uv|poetry) add|uvx|pipx run)((?:[ \t]+[^\s#;|&]+)+)"
)
VALUED = {"-c", "--constraint", "-r", "--requirement", "-i", "--index-url"}
NAME = re.compile(r"[A-Za-z][\w.-]*?(?=$|[\[=<>~!'\"`,.:)])")
WITH_EXTRA = re.compile(r"(?<![\w/.$}-])tiercache\[[a-z]")
"""An extra of a distribution `tiercache`; labels and paths look otherwise."""
OTHERS = {"spoolcache", "tokenizers", "pip-audit", "pip-tools", "cupy-cuda13x"}
"""Published distributions that texts name, beside those that this one depends on."""


@cache
def published() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    return {canonicalize_name(Requirement(text).name) for text in wanted} - {DISTRIBUTION} | OTHERS


def instructions(text: str) -> Iterator[str]:
    """Names of the distributions that a text says to install: no options, paths, variables or files."""
    for found in COMMAND.finditer(re.sub(r"\\\n|[\"'] *\n *f?[\"']", " ", text)):
        words = iter(found[1].split())
        for word in words:
            if word in VALUED:
                next(words, None)
            elif "/" not in word and ".whl" not in word and (name := NAME.match(word.lstrip("'\"`("))):
                yield canonicalize_name(name[0])
            if word[-1] in '"`.,:)':
                break  # a sentence goes on behind it


def wrong(path: Path, text: str) -> list[str]:
    """Return what a text says to install that cannot be had, or is another project's."""
    allowed = published() | ({DISTRIBUTION} if path.suffix == ".py" else set())
    return [name for name in instructions(text) if name not in allowed] + WITH_EXTRA.findall(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pip install tiercache", ["tiercache"]),
        ("    /opt/x/bin/pip install --quiet -c c.txt 'tiercache[http]'", ["tiercache", "tiercache[h"]),
        ("install it with `pip install tiercache`.", ["tiercache"]),
        ("it needs `tiercache[metrics]`", ["tiercache[m"]),
        ("RUN python -m pip install --no-cache-dir \\\n    numpy tiercache==0.1", ["tiercache"]),
        ('"needs it: pip install"\n    " \'tiercache[worker]\'"', ["tiercache", "tiercache[w"]),
        ("uv add tiercache", ["tiercache"]), ("pipx install tiercache", ["tiercache"]),
        ("pip install tiercache-hybrid", ["tiercache-hybrid"]),
        ("pip install 'tiercache-hybrid[grpc]'", ["tiercache-hybrid"]),
        ("pip install tiercache-something", ["tiercache-something"]),
        ("pip install '.[grpc]'", []), ("pip install 'path/to/checkout[grpc]'", []), ("pip install -e .", []),
        ("pip install dist/tiercache_hybrid-0.1.0-py3-none-any.whl", []), ("pip install numpy grpcio", []),
        ("install 'x'; up{job=\"tiercache\"}", []),
    ],
)  # fmt: skip
def test_the_guard_of_texts_finds_what_is_wrong(text: str, found: list[str]) -> None:
    assert wrong(Path("text.md"), text) == found


def test_no_text_says_to_install_a_distribution_that_is_another_s_or_not_published() -> None:
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    paths += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    found = {}
    for path in paths:
        if path == Path(__file__) or path.suffix in {".pyc", ".svg", ".png", ".npz"}:
            continue
        try:
            names = wrong(path, path.read_text())
        except UnicodeDecodeError:
            continue
        if names:
            found[str(path.relative_to(ROOT))] = names
    assert found == {}


def test_the_lab_is_of_the_same_version_and_licence_and_asks_for_the_product() -> None:
    assert (ROOT / "lab/LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    product, lab = (
        tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"] for path in (".", "lab")
    )
    assert lab["version"] == product["version"]
    [needed] = [text for text in lab["dependencies"] if Requirement(text).name == DISTRIBUTION]
    assert needed == f"{DISTRIBUTION}[all]=={product['version']}"


def foreign(site: Path, module: str = "") -> Path:
    """Make another project's distribution `tiercache` 0.1.13 in a folder, as pip would install it."""
    info = site / "tiercache-0.1.13.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiercache\nVersion: 0.1.13\n")
    files = [f"{info.name}/METADATA", f"{info.name}/RECORD"]
    if module:
        (site / "tiercache").mkdir(exist_ok=True)
        (site / "tiercache/__init__.py").write_text(module)
        files.append("tiercache/__init__.py")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    return site


SENTENCE = (
    "the distribution tiercache 0.1.13 in this environment is not tiercache-hybrid, but has the same"
    " import name; pip uninstall tiercache tiercache-hybrid, then install tiercache-hybrid again from its"
    " checkout or wheel"
)
HIDING = "from tiercache.manager import CacheManager\n"
"""An `__init__` that fails beside our files, as that of the real one does."""


def command(*words: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    program = (folder or Path(sys.executable).parent) / "tiercache"
    return subprocess.run([program, *words], capture_output=True, text=True, env=os.environ | variables)


def test_nothing_is_said_where_there_is_no_other() -> None:
    assert foreign_sentence() == ""
    assert command("--version").stderr == ""
    assert "import name" not in command("doctor").stdout


def test_the_version_and_doctor_name_another_distribution_of_the_import_name(tmp_path: Path) -> None:
    site = str(foreign(tmp_path))
    done = command("--version", PYTHONPATH=site)
    assert (done.returncode, done.stderr) == (0, f"tiercache: {SENTENCE}\n")
    assert done.stdout.startswith("tiercache 0.")
    done = command("doctor", "-o", "jsonl", "-s", site, PYTHONPATH=site)
    assert done.returncode == 6
    row = '"name": "import name", "level": "fail", "found": "the distribution tiercache 0.1.13'
    assert row in done.stdout.replace('":"', '": "').replace('","', '", "')


def test_the_command_names_the_distribution_that_hides_this_one(tmp_path: Path) -> None:
    done = command("doctor", PYTHONPATH=str(foreign(tmp_path, HIDING)))
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"tiercache: {SENTENCE}\n")


@pytest.mark.slow
def test_a_wheel_beside_another_distribution_of_its_import_name(tmp_path: Path) -> None:
    """Installed after ours, it replaces our `__init__`; installed before ours, it is replaced."""
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = tmp_path.glob("tiercache_hybrid-*.whl")
    other = tmp_path / "tiercache-0.1.13-py3-none-any.whl"
    foreign(tmp_path / "other", HIDING)
    with ZipFile(other, "w") as archive:
        info = "tiercache-0.1.13.dist-info"
        for name in ("tiercache/__init__.py", f"{info}/METADATA", f"{info}/RECORD"):
            archive.write(tmp_path / "other" / name, name)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
    venv.create(tmp_path / "env", with_pip=True)
    folder = tmp_path / "env/bin"

    def pip(*words: object) -> str:
        line = [folder / "python", "-m", "pip", "--disable-pip-version-check", *words]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout

    def answer() -> tuple[int, str]:
        done = command("--version", folder=folder)
        return done.returncode, done.stderr

    pip("install", f"{wheel}[cli]")
    assert answer() == (0, "")
    # The line of a missing extra finds the installed distribution, although no registry has it.
    assert "Would install" in pip("install", "--dry-run", f"{DISTRIBUTION}[events]")
    pip("install", "--no-deps", other)
    assert answer() == (2, f"tiercache: {SENTENCE}\n")
    pip("install", "--no-deps", "--force-reinstall", wheel)
    assert answer() == (0, f"tiercache: {SENTENCE}\n")
    pip("uninstall", "--yes", "tiercache", DISTRIBUTION)
    pip("install", "--no-deps", wheel)
    assert answer() == (0, "")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_building_pages_installs_nothing_into_somebody_s_environment(tmp_path: Path) -> None:
    venv.create(tmp_path / "theirs")
    before = sorted(tmp_path.rglob("*"))
    line = ["make", "--no-print-directory", "site", f"VENV={tmp_path}/theirs"]
    environment = os.environ | {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "has no MkDocs, and is left as it is" in done.stdout
    assert sorted(tmp_path.rglob("*")) == before

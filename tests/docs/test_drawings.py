"""The drawings in docs/images are those that their source draws."""

from __future__ import annotations

import json
import subprocess
import sys
from xml.etree import ElementTree

from tests.docs.pages import ROOT

CODE = "import json, drawings; print(json.dumps(drawings.drawings()))"


def test_the_drawings_are_what_their_source_draws() -> None:
    """`make docs` draws them anew, also when a table changes whose figures they show."""
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT / "docs/generator", check=True, capture_output=True, text=True
    )
    drawn = json.loads(done.stdout)
    page = (ROOT / "docs/how-it-works.md").read_text()
    for name, text in drawn.items():
        assert (ROOT / "docs/images" / name).read_text() == text, f"{name}: run `make docs`"
        assert f"](images/{name})" in page
        root = ElementTree.fromstring(text)
        width, height = (float(side) for side in root.attrib["viewBox"].split()[2:])
        for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
            right = float(rect.get("x", "0")) + float(rect.attrib["width"])
            below = float(rect.get("y", "0")) + float(rect.attrib["height"])
            assert (right <= width, below <= height) == (True, True), name

"""Write the drawings of docs/how-it-works.md into docs/images (`make docs`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from drawing import WIDTH, Drawing

ROOT: Final = Path(__file__).parents[2]
LEFT: Final = 16
FULL: Final = WIDTH - 2 * LEFT
NAMES: Final = {"disk, page cache warm": "disk, warm", "disk, page cache dropped": "disk, cold"}


def prompt() -> str:
    """Draw the life of a prompt."""
    steps = (
        ("cold", "1  lookup",
         "Which depths of the prompt are known?", "Storage is asked in the background."),
        ("warm", "2  admit",
         "Slots are reserved and paths pinned:", "everything, or nothing."),
        ("cool", "3  poll",
         "The deepest depth with all pages and a state", "comes to the host, and each byte is checked."),
        ("hot", "4  load",
         "From host to device, layer by layer,", "while the first layers compute."),
        ("box", "5  compute",
         "The engine computes what was not restored,", "cut where a state is worth keeping."),
        ("warm", "6  commit",
         "Pages and states enter the index;", "copies go to host and storage behind it."),
        ("cold", "7  release", "Pins end. What nobody needs may be evicted."),
    )  # fmt: skip
    made = Drawing(530, "The life of a prompt in seven steps")
    y = 16.0
    for kind, title, *lines in steps:
        end = made.box(LEFT, y, FULL, kind, title, *lines)
        if kind != "cold" or title.startswith("1"):
            made.arrow(WIDTH / 2, end, WIDTH / 2, end + 20)
        y = end + 20
    return made.svg()


def tiers() -> str:
    """Draw the tiers, and the ways of bytes between them."""
    rows = (
        ("hot", "device", "the engine's own tensors", "load: layer by layer", "store: at commit"),
        (
            "warm",
            "host",
            "one page-locked arena, one byte budget",
            "fetch: verified on the way",
            "write-through",
        ),
        ("cool", "near store", "file or LMDB on a local disk", "promotion", "copies"),
        ("cold", "far store", "daemon, bucket, or memory of many hosts", "", ""),
    )
    made = Drawing(426, "Four tiers; bytes go up to restore a prompt and down to keep it")
    y = 44.0
    made.text(LEFT + 40, 26, "up: to restore", "small", "start")
    made.text(WIDTH - LEFT - 40, 26, "down: to keep", "small", "end")
    for kind, title, line, up, down in rows:
        end = made.box(LEFT, y, FULL, kind, title, line)
        y = end + 62
        if up:
            made.arrow(LEFT + 24, y, LEFT + 24, end)
            made.text(LEFT + 36, end + 35, up, "small")
            made.arrow(WIDTH - LEFT - 24, end, WIDTH - LEFT - 24, y)
            made.text(WIDTH - LEFT - 36, end + 35, down, "small", "end")
    made.text(WIDTH / 2, 410, "One ranking says what each tier keeps.", "small", "middle")
    return made.svg()


def wings() -> str:
    """Draw the two wings of the code, and their common ground."""
    made = Drawing(358, "The store wing and the cache wing stand on common ground and do not know each other")
    half = (FULL - 12) / 2
    right = LEFT + half + 12
    made.box(LEFT, 16, FULL, "box", "lab and terminal", "replay, bench, prove, demo; one file a verb")
    store = ("for SGLang, vLLM,", "operators", "", "daemon", "plug-ins", "wire", "storage", "stores")
    cache = ("for engines of your", "own, and the replay", "",
             "worker", "controller", "index", "transfer", "kernels")  # fmt: skip
    for x, title, words, kind in ((LEFT, "store wing", store, "cold"), (right, "cache wing", cache, "hot")):
        made.box(x, 76, half, kind, title, *words)
        made.arrow(x + half / 2, 222, x + half / 2, 246)
    made.box(
        LEFT, 246, FULL, "cool", "common ground",
        "pools, policy, metrics, events, models, keys,", "geometry, memory, threads, errors",
    )  # fmt: skip
    made.text(WIDTH / 2, 326, "The wings meet in one contract only:", "small", "middle")
    made.text(WIDTH / 2, 342, "the controller calls a StorageBackend.", "small", "middle")
    return made.svg()


def bars(title: str, rows: list[tuple[str, float, str]], most: float) -> str:
    """Draw horizontal bars with their names and figures."""
    made = Drawing(50 + 30 * len(rows), title)
    made.text(LEFT, 26, title, "title")
    for n, (name, value, said) in enumerate(rows):
        y = 42 + 30 * n
        made.text(LEFT, y + 15, name, "small")
        made.rect(LEFT + 92, y, max(2.0, round(186 * value / most, 1)), 22, "hot" if n == 0 else "cold")
        made.text(WIDTH - LEFT, y + 15, said, "small", "end")
    return made.svg()


def table(page: str, title: str) -> list[list[str]]:
    """Return the cells of the first table behind a title of a page."""
    text = (ROOT / "docs" / page).read_text().partition(f"\n{title}\n")[2]
    found = re.search(r"(?m)(?:^\|.*\n)+", text)
    assert found is not None, (page, title)
    rows = [[cell.strip(" *`") for cell in row.strip("|").split("|")] for row in found.group().splitlines()]
    return [rows[0], *rows[2:]]


def policies() -> str:
    """Draw the mean of each policy at a capacity of 5 %, from the table of docs/policies.md."""
    head, *rows = table("policies.md", "### At 5%")
    at = head.index("mean")
    wanted = ("hvd", "lpc", "seglen:additive", "lru", "marconi", "seglen", "clairvoyant")
    means = {row[0]: float(row[at]) for row in rows if row[0] in wanted}
    return bars(
        "Prefill FLOPs saved at 5 % capacity",
        [(name, means[name], f"{means[name]:.3f}") for name in wanted],
        0.8,
    )


def first_token() -> str:
    """Draw the time to the first token, from the first table of docs/benchmarks.md."""
    _, *rows = table("benchmarks.md", "## Demo: `tiercache demo`")
    figures = [(NAMES.get(row[0], row[0]), float(row[1].split()[0])) for row in rows]
    computed = max(float(row[2].split()[0].replace(",", "")) for row in rows)
    shown = [(name, value, f"{value:g} ms") for name, value in figures]
    return bars(
        "First token of a prompt of 4,097 tokens",
        [*shown, ("computed", computed, f"{computed:,g} ms")],
        computed * 1.1,
    )


def drawings() -> dict[str, str]:
    """Return every drawing by its file name."""
    return {
        "prompt.svg": prompt(),
        "tiers.svg": tiers(),
        "wings.svg": wings(),
        "policies.svg": policies(),
        "first-token.svg": first_token(),
    }


if __name__ == "__main__":
    for name, text in drawings().items():
        (ROOT / "docs/images" / name).write_text(text)

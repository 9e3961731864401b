"""Reader of the pages of an LMDB file, from the bytes of the file alone.

The format follows LMDB's own description: a page has 16 bytes of header (number, pad, flags, lower, upper),
then 2-byte offsets of nodes, or, for fixed-size duplicates, the values themselves. Two meta pages name the
roots of the list of free pages and of the main tree, in which the roots of the named trees lie.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

PAGE: Final = 4096
_HEADER: Final = struct.Struct("<QHHHH")
_META: Final = struct.Struct("<16xIIQQ48s48sQQ")
_NODE: Final = struct.Struct("<HHHH")
_ROOT: Final = 40
"""Offset of a tree's root in its description."""
_BRANCH, _LEAF, _LEAF2 = 1, 2, 0x20
_BIG, _TREE = 1, 2
_NONE: Final = 2**64 - 1


class Page(NamedTuple):
    """A page that is in use: its tree, "branch", "leaf" or "run" (what a large value takes), its bytes, and
    of a run the value's key.
    """

    number: int
    tree: str
    kind: str
    content: bytes
    key: bytes = b""

    @property
    def role(self) -> str:
        return f"{self.tree}.{self.kind}"


class Node(NamedTuple):
    """A key and its value in a leaf page.

    `at`: the offset in it; a large value's is the number of its first page.
    """

    key: bytes
    flags: int
    value: bytes
    at: int


def used_pages(data: bytes) -> Iterator[Page]:
    """Every page in use, the two meta pages first."""
    metas = [_META.unpack_from(data, n * PAGE) for n in range(2)]
    newest = max(metas, key=lambda meta: meta[-1])
    for n in range(2):
        yield Page(n, "meta", "leaf", data[n * PAGE : (n + 1) * PAGE])
    free, main = newest[4], newest[5]
    yield from _tree(data, "free", _root(free))
    yield from _tree(data, "main", _root(main))


def nodes(content: bytes) -> list[Node]:
    """The nodes of a leaf page; none of one of fixed-size values."""
    _, _, flags, _, _ = _HEADER.unpack_from(content)
    found = []
    for at in [] if flags & _LEAF2 else _offsets(content):
        low, high, flags, size = _NODE.unpack_from(content, at)
        start = at + _NODE.size
        length = 8 if flags & _BIG else low | high << 16
        found.append(
            Node(content[start : start + size], flags, content[start + size : start + size + length], at)
        )
    return found


def live(content: bytes) -> bytes:
    """A leaf page with zeros in the place of what is left there of older times."""
    _, size, flags, lower, _ = _HEADER.unpack_from(content)
    kept = bytearray(len(content))
    spans = [(_HEADER.size, (lower - _HEADER.size) // 2 * size)] if flags & _LEAF2 else []
    spans += [(node.at, _NODE.size + len(node.key) + len(node.value)) for node in nodes(content)]
    for start, length in spans:
        kept[start : start + length] = content[start : start + length]
    return bytes(kept)


def _offsets(content: bytes) -> tuple[int, ...]:
    _, _, _, lower, _ = _HEADER.unpack_from(content)
    return struct.unpack_from(f"<{(lower - _HEADER.size) // 2}H", content, _HEADER.size)


def _root(description: bytes) -> int:
    return int.from_bytes(description[_ROOT : _ROOT + 8], "little")


def _tree(data: bytes, name: str, root: int) -> Iterator[Page]:
    """The pages of a tree and of the trees in it; those of a key's duplicates count as the same tree's."""
    if root == _NONE:
        return
    content = data[root * PAGE : (root + 1) * PAGE]
    _, _, flags, _, _ = _HEADER.unpack_from(content)
    if flags & _BRANCH:
        yield Page(root, name, "branch", content)
        for at in _offsets(content):
            low, middle, high, _ = _NODE.unpack_from(content, at)
            yield from _tree(data, name, low | middle << 16 | high << 32)
        return
    assert flags & _LEAF, f"page {root} of {name} is no page of a tree"
    yield Page(root, name, "leaf", content)
    for node in nodes(content):
        if node.flags & _BIG:
            yield from _run(data, name, node)
        elif node.flags & _TREE:
            yield from _tree(data, node.key.decode() if name == "main" else name, _root(node.value))


def _run(data: bytes, name: str, node: Node) -> Iterator[Page]:
    first = int.from_bytes(node.value, "little")
    _, _, _, count = struct.unpack_from("<QHHI", data, first * PAGE)
    for number in range(first, first + count):
        yield Page(number, name, "run", data[number * PAGE : (number + 1) * PAGE], node.key)

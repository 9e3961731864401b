"""The verb `tiercache explain`: how deep a prompt can be restored, and why not deeper."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tiercache.cli.store.forest import Forest
from tiercache.cli.store.prompt import (
    ExtraOption,
    TextFileOption,
    TextOption,
    TokenizerOption,
    TokensOption,
    extra_of,
    tokens_of,
)
from tiercache.cli.store.reasons import (
    Explanation,
    Layout,
    differing,
    explain_path,
    follow,
    keys_of_prompt,
    moment,
    sentence,
)
from tiercache.cli.store.selection import MacKeyOption, Namespaces, StoresOption
from tiercache.cli.store.target import opened, resolve_all
from tiercache.cli.terminal import (
    SHORTER,
    Exit,
    Output,
    OutputOption,
    console,
    count_text,
    ranges,
    ranges_text,
    records,
    safe,
)
from tiercache.core import HitPolicy, TokenArray
from tiercache.errors import InputError
from tiercache.keys import KEY_BYTES, page_keys, sglang_page_keys
from tiercache.storage.base import NamespaceRecord, StorageBackend

if TYPE_CHECKING:
    from rich.console import Console

_CELLS: Final = 60
"""Maximum width of the picture of a prompt, in characters."""


def explain(
    store: StoresOption = None,
    tokens: TokensOption = "",
    text: TextOption = None,
    text_file: TextFileOption = "",
    tokenizer: TokenizerOption = "",
    namespace: Annotated[
        str,
        typer.Option(
            help="Namespace that was asked: first digits of its id, or a part of its label. Default: the one"
            " that can restore most."
        ),
    ] = "",
    extra: ExtraOption = "",
    mac_key: MacKeyOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Explain how deep a prompt can be restored, and why not deeper. Exit code 6 if nothing of it can be.

    For each tier and pool: which pages and states are there, and what is
    missing first at each depth that could be restored, and why. A daemon
    remembers what was removed since it started; of a stopped store only
    what is there is known. The same tokens under another identity (another
    model, page size or dtype) are found too, with the fields that differ:

        tiercache explain --tokens prompt.json -s grpc://n7:7070

        tiercache explain --text-file p.txt --tokenizer /models/q3 -s /var/lib/tiercache

    JSON: tokens, looked_at (labels of all namespaces), hidden_namespaces, and
    namespaces (jsonl: one line each), the asked one first: namespace, label,
    identity, page_size, pages, page_keys (for `tiercache inspect`), limit (of a
    restore, in pages), restorable (pages, tokens), restorable_depths, tiers (tier, why, removals_since,
    layouts: pool, layout, present), gaps (first, last, pool, layout, missing,
    page, reason, removed, stored_behind), removals_known_since, differs
    (field: here, asked). Depths count pages, from 1; ranges have both ends.
    """
    extra_bytes = extra_of(extra)
    prompt = tokens_of(tokens, text, text_file, tokenizer)
    with opened(resolve_all(store, mac_key)) as found:
        known = {record.namespace: record for record in found.namespaces()}
        names = Namespaces({name: record.identity for name, record in known.items()})
        explanations = _explanations(found, names, known, namespace, prompt, extra_bytes)
    if output is Output.TABLE:
        _print(explanations, names, prompt)
    else:
        _write(explanations, names, prompt, output)
    if not explanations or not explanations[0].deepest:
        raise typer.Exit(Exit.NO)


def _explanations(
    store: StorageBackend,
    names: Namespaces,
    known: Mapping[bytes, NamespaceRecord],
    text: str,
    prompt: TokenArray,
    extra: bytes,
) -> list[Explanation]:
    """Return the explanation for each namespace that has or had something of the prompt.

    The namespace that was asked for comes first, otherwise the one that can restore most.
    """
    asked = names.one(text, known) if text else None
    sizes = {name: size for name in sorted(known) if (size := _page_size(names, name))}
    if asked is not None and asked not in sizes:
        raise InputError(
            f"namespace {names.named(asked)} has no page size on record, or belongs to a tenant, so a prompt"
            " cannot be cut into its pages"
        )
    # A namespace of which nothing is left is found by the removal of its first page.
    firsts = [
        key
        for name, size in sizes.items()
        for key in (
            *page_keys(name, prompt[:size], size, extra=extra),
            *(() if extra else sglang_page_keys(name, prompt[:size], size)),
        )
    ]
    removed = {firsts[removal.page] for removal in store.history([], firsts).removals}
    forest = Forest(store.scan_all())

    def is_known(page: bytes) -> bool:
        return page in forest.pages or page in removed

    found = []
    for name, size in sizes.items():
        pages = keys_of_prompt(name, prompt, size, extra, is_known)
        path = follow(forest, name, prompt, size, pages)
        if name == asked or path.matched or any(page in removed for page in pages[:1]):
            keys = [layout.key_of(page) for layout in path.layouts for page in path.keys]
            history = store.history(keys, path.keys)
            found.append(explain_path(path, history, states=known[name].states))
    found.sort(key=lambda one: (one.path.namespace != asked, -one.deepest, -one.path.matched))
    return found


def _page_size(names: Namespaces, namespace: bytes) -> int:
    """Return the tokens per page; 0 if they are not known, or if the pages cannot be named.

    The namespace of a tenant is hidden from callers without a tenant, and its pages are too.
    """
    size = names.identity(namespace).get("page_size")
    usable = isinstance(size, int) and not isinstance(size, bool) and 0 < size < 2**32
    return int(size) if usable and size is not None and len(namespace) == KEY_BYTES else 0


# --- JSON
# ------------------------------------------------------------------------------------------------------------


def _write(found: Sequence[Explanation], names: Namespaces, prompt: TokenArray, output: Output) -> None:
    rows = [_record(one, found[0], names) for one in found]
    looked = [names.named(name) for name in sorted(names.records) if _page_size(names, name)]
    whole = {
        "tokens": len(prompt),
        "looked_at": looked,
        "hidden_namespaces": _hidden(names),
        "namespaces": rows,
    }
    records(rows, output, whole)


def _hidden(names: Namespaces) -> int:
    return sum(not _page_size(names, name) for name in names.records)


def _record(found: Explanation, asked: Explanation, names: Namespaces) -> dict[str, Any]:
    path = found.path
    return {
        **names.record(path.namespace),
        "page_size": path.page_size,
        "pages": len(path.keys),
        "page_keys": [key.hex() for key in path.keys],
        "limit": path.limit,
        "restorable": {"pages": found.deepest, "tokens": found.deepest * path.page_size},
        "restorable_depths": ranges(found.depths),
        "tiers": [
            {
                "tier": tier.name or None,
                "why": tier.why or None,
                "removals_since": tier.since,
                "layouts": [
                    {"pool": str(layout.pool), "layout": layout.layout.hex(), "present": ranges(depths)}
                    for layout, depths in _by_layout(found, tier.present)
                ],
            }
            for tier in found.history.tiers
        ],
        "gaps": [gap.record() for gap in found.gaps],
        "removals_known_since": found.known_since,
        "differs": {name: list(values) for name, values in _differing(found, asked, names).items()},
    }


def _by_layout(found: Explanation, present: Sequence[bool]) -> Iterator[tuple[Layout, list[int]]]:
    """Yield each layout with the depths at which a tier has it; the flags are those of `_explanations`."""
    pages = len(found.path.keys)
    for number, layout in enumerate(found.path.layouts):
        some = present[number * pages : (number + 1) * pages]
        yield layout, [depth for depth, there in enumerate(some, 1) if there]


def _differing(found: Explanation, asked: Explanation, names: Namespaces) -> Mapping[str, tuple[Any, Any]]:
    return differing(names.identity(found.path.namespace), names.identity(asked.path.namespace))


# --- tables
# ------------------------------------------------------------------------------------------------------------


def _print(found: Sequence[Explanation], names: Namespaces, prompt: TokenArray) -> None:
    to, now = console(), time.time()
    if not found:
        to.print(
            f"{count_text(len(prompt), 'token')}: no namespace has a page of this prompt, or is remembered to"
            " have had one",
            markup=False,
        )
    for number, one in enumerate(found):
        if number:
            to.print()
        _print_one(to, one, found[0], names, now)
    looked = [name for name in names.records if _page_size(names, name)]
    without = [name for name in looked if name not in {one.path.namespace for one in found}]
    if without:
        shown = ", ".join(names.label(name) for name in sorted(without)[:4])
        more = f" and {len(without) - 4} more" if len(without) > 4 else ""
        to.print(f"[dim]nothing of the prompt in: {safe(shown)}{more}[/]", soft_wrap=True)
    if hidden := _hidden(names):
        to.print(
            f"[dim]{count_text(hidden, 'namespace')} of tenants, or without a page size, cannot be searched"
            " from here[/]",
            soft_wrap=True,
        )


def _print_one(to: Console, found: Explanation, asked: Explanation, names: Namespaces, now: float) -> None:
    path, size = found.path, found.path.page_size
    to.print(
        f"[bold]{safe(names.named(path.namespace))}[/]: {count_text(path.tokens, 'token')} ="
        f" {count_text(len(path.keys), 'page')} of {size}; at most {path.limit:,} can be restored",
        soft_wrap=True,
    )
    if found is not asked:
        for text in _differences(found, asked, names):
            to.print(f"  [yellow]{safe(text)}[/]", soft_wrap=True)
    names_of_tiers = [tier.name or "store" for tier in found.history.tiers]
    width = max([len("restorable"), *map(len, names_of_tiers)])
    for tier, name in zip(found.history.tiers, names_of_tiers, strict=True):
        if tier.why:
            to.print(f"  {safe(name.ljust(width))}  [red]is not asked: {safe(tier.why)}[/]", soft_wrap=True)
        for layout, depths in _by_layout(found, tier.present):
            label = f"{layout.pool!s:<8}[dim]{layout.layout.hex()[:SHORTER]}[/]"
            bar = _bar(depths, len(path.keys), layout)
            to.print(
                f"  {safe(name.ljust(width))}  {label}  {bar}  {ranges_text(depths, 6) or 'nothing'}",
                soft_wrap=True,
            )
    if not path.layouts:
        to.print("  nothing of this namespace is stored", soft_wrap=True)
    marks = _cells(found.depths, len(path.keys), "▲", "▲", " ")
    text = f"up to page {found.deepest} ({count_text(found.deepest * size, 'token')})"
    answer = f"[green]{text}[/]" if found.depths else "[red]nothing[/]"
    to.print(f"  {'restorable'.ljust(width)}  {'':16}  [green]{marks}[/]  {answer}", soft_wrap=True)
    for gap in found.gaps:
        if gap.last < found.deepest:
            continue
        where = f"page {gap.first}" if gap.first == gap.last else f"pages {gap.first}..{gap.last}"
        to.print(f"  {where}: {safe(sentence(gap, found, now))}", soft_wrap=True)
    since = [tier.since for tier in found.history.tiers if tier.since is not None]
    if not since:
        to.print("  [dim]removals are not known here: only presence is[/]", soft_wrap=True)
    elif found.history.forgotten:
        to.print(
            f"  [dim]removals up to {moment(found.history.forgotten, now)} are forgotten[/]", soft_wrap=True
        )


def _differences(found: Explanation, asked: Explanation, names: Namespaces) -> list[str]:
    fields = _differing(found, asked, names)
    if not fields:
        return ["the same identity in every field on record; a salt or an older version made other keys"]
    return [
        f"another identity, so not found by the one above: {name} is {_value(here)}, not {_value(there)}"
        for name, (here, there) in fields.items()
    ]


def _value(value: object) -> str:
    return "not on record" if value is None else repr(value)


def _bar(depths: Sequence[int], pages: int, layout: Layout) -> str:
    if layout.presence.hit_policy is HitPolicy.ALL_PAGES:
        return _cells(depths, pages, "█", "▒", "·")
    return _cells(depths, pages, "◆", "◆", "·")


def _cells(depths: Sequence[int], pages: int, full: str, part: str, none: str) -> str:
    """Return a picture of `pages` pages, of which those at `depths` are there."""
    width = min(pages, _CELLS)
    there = [0] * width
    size = [0] * width
    for page in range(pages):
        size[page * width // pages] += 1
    for depth in depths:
        there[(depth - 1) * width // pages] += 1
    return "".join(
        none if not has else full if has == of else part for has, of in zip(there, size, strict=True)
    )

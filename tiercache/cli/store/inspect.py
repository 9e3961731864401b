"""`tiercache inspect`: shows one page, the tree of a namespace, or the stored part of a prompt."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

import typer
from rich.tree import Tree

from tiercache.cli.exits import Exit
from tiercache.cli.output import SHORT, Output, OutputOption, clean, console, count_text, document, line, safe, whole
from tiercache.cli.store import rows
from tiercache.cli.store.forest import Forest
from tiercache.cli.store.names import Namespaces, check_hex, one_key
from tiercache.cli.store.options import MacKeyOption, StoreOption
from tiercache.cli.store.paths import draw, follow
from tiercache.cli.store.prompt import tokens_of
from tiercache.cli.store.reading import Reading
from tiercache.cli.store.runs import plant, runs_of, summary
from tiercache.cli.store.target import Target, check_reached, opened, resolve
from tiercache.core import Outcome, TokenArray
from tiercache.errors import ConfigError, InputError
from tiercache.storage.base import StorageBackend

_KEY_DIGITS: Final = 64
"""Hex digits of a page key; an object's whole key, layout and page key, has twice as many."""
_CHAIN: Final = 3
"""Ancestors of a page that a table shows; JSON has all."""


def inspect(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="The first digits of a page key, or all of an object's.", show_default=False)
    ] = "",
    store: StoreOption = "",
    namespace: Annotated[str, typer.Option(help="The tree of this namespace; with a prompt: look only there.")] = "",
    tokens: Annotated[str, typer.Option(metavar="FILE", help="A prompt's token ids: JSON, text or .npy; - for stdin.")] = "",
    text: Annotated[str | None, typer.Option(help="A prompt, for --tokenizer.", show_default=False)] = None,
    text_file: Annotated[str, typer.Option(metavar="FILE", help="A file with a prompt, for --tokenizer; - for stdin.")] = "",
    tokenizer: Annotated[
        str, typer.Option(metavar="DIR", help="The model's directory with tokenizer.json; its special tokens are added.")
    ] = "",
    extra: Annotated[
        str, typer.Option(metavar="HEX", help="What tiercache.keys.sequence_extra gives for the prompt's adapter or images.")
    ] = "",
    verify: Annotated[bool, typer.Option("--verify", help="Read and check the page's objects too; a daemon drops a corrupt one.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Parts of a tree that are drawn.")] = 500,
    mac_key: MacKeyOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one page with all that belongs to it, the tree of a namespace, or how much of a prompt could be restored.

    A page of a stopped store, its objects read and checked; all that is
    stored of a model; and what a daemon has of a prompt:

        tiercache inspect 3fa9c2 -s /var/lib/tiercache --verify

        tiercache inspect --namespace qwen3 -s /var/lib/tiercache

        tiercache inspect --text-file p.txt --tokenizer /models/q3 -s grpc://n7:7070

    JSON of a page: page_key, namespace, label, depth, objects (the fields of
    ls; verified = hit, corrupt, ...: with --verify, else null), chain (page
    keys above it, nearest first), chain_ends (root, missing or unknown),
    missing (page key), children, pages_below. Of a namespace: namespace, label,
    identity, runs (run, parent_run, first_depth, last_depth, first_page,
    last_page, pools, states, bytes, orphan, missing); with jsonl one run per
    line. Of a prompt, for each namespace that has any of it: namespace, label,
    identity, page_size, tokens, pages, matched_pages, layouts (present: ranges
    of depths), restorable (pages, tokens), branches, orphans, page_keys. Depths
    count pages, from 1.
    """
    prompts = [option for option, given in (("--tokens", tokens), ("--text", text is not None), ("--text-file", text_file)) if given]
    _check_use(key, namespace, prompts, verify, extra, tokenizer)
    digits = check_hex(key, "KEY", 2 * _KEY_DIGITS) if key else ""
    beside = _extra(extra)
    prompt = tokens_of(tokens, text, text_file, tokenizer) if prompts else None
    target = resolve(store, mac_key)
    with opened(target) as found:
        names = Namespaces.of(found)
        if prompt is not None:
            _prompt(found, names, namespace, prompt, beside, limit, output)
        elif namespace:
            _namespace(found, names, namespace, limit, output)
        else:
            _page(target, found, names, digits, verify, output)


def _check_use(key: str, namespace: str, prompts: list[str], verify: bool, extra: str, tokenizer: str) -> None:
    if not (key or namespace or prompts):
        raise ConfigError(
            "inspect needs a page KEY, a --namespace or a prompt (--tokens, --text or --text-file); `tiercache ls` shows keys"
        )
    if len(prompts) > 1:
        raise ConfigError(f"{' and '.join(prompts)} are two prompts; give one")
    if key and (namespace or prompts):
        raise ConfigError("a KEY names one page already; leave --namespace and the prompt away")
    if verify and not key:
        raise ConfigError("--verify goes with a KEY; use `tiercache verify --namespace` for more than one page")
    if extra and not prompts:
        raise ConfigError("--extra goes with a prompt; give --tokens, --text or --text-file too")
    if tokenizer and not prompts:
        raise ConfigError("--tokenizer goes with --text or --text-file; give one of them")


def _extra(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise ConfigError(f"--extra {clean(text)!r} is not hex; give sequence_extra(adapter, images).hex()") from error


def _page(target: Target, store: StorageBackend, names: Namespaces, digits: str, verify: bool, output: Output) -> None:
    forest = Forest(store.scan_all())
    page = forest.pages[_page_key(forest, digits)]
    entries = [entry for entry in page.entries if len(digits) <= _KEY_DIGITS or entry.key.digest.hex().startswith(digits)]
    outcomes: list[str | None] = [None] * len(entries)
    if verify:
        outcomes = [str(checked.outcome) for batch in Reading(store).check(entries) for checked in batch]
        check_reached(target, store)
    ends, missing = forest.end_of(page.key)
    record = {
        "page_key": page.key.hex(),
        "namespace": page.namespace.hex(),
        "label": names.label(page.namespace),
        "depth": page.depth,
        "objects": [{**rows.record(entry), "verified": outcome} for entry, outcome in zip(entries, outcomes, strict=True)],
        "chain": [above.hex() for above in forest.chain(page.key)],
        "chain_ends": ends,
        "missing": None if missing is None else missing.hex(),
        "children": [child.hex() for child in page.children],
        "pages_below": len(forest.below([page.key])) - 1,
    }
    if output is Output.TABLE:
        _print(record, [rows.row(entry, time.time()) for entry in entries])
    else:
        whole(record, output)
    if Outcome.CORRUPT in outcomes:
        raise typer.Exit(Exit.CORRUPT)


def _page_key(forest: Forest, digits: str) -> bytes:
    """Return the key of the page that `digits` name: the start of its key, or the whole key of one of its objects."""
    if len(digits) <= _KEY_DIGITS:
        return one_key(digits, forest.pages, "KEY")
    if len(digits) < 2 * _KEY_DIGITS:
        raise ConfigError(f"KEY has {len(digits)} digits; a page key has 64 and an object's key, layout and page key, 128")
    key = one_key(digits[_KEY_DIGITS:], forest.pages, "KEY")
    if not any(entry.key.digest.hex() == digits for entry in forest.pages[key].entries):
        raise ConfigError(f"KEY {digits[:SHORT]}... names a stored page in a layout that is not stored; give the page key alone to see it")
    return key


def _print(record: dict[str, Any], lines: list[str]) -> None:
    to = console()
    above = record["chain"]
    end = {"root": "the root", "unknown": "a page whose parent nobody noted"}.get(record["chain_ends"], "")
    end = end or f"[red]page {record['missing'][:SHORT]}, which is missing: an ORPHAN[/]"
    some = " > ".join(key[:SHORT] for key in above[:_CHAIN]) + (" > ..." if len(above) > _CHAIN else "")
    to.print(f"[bold]page {record['page_key']}[/]", soft_wrap=True)
    to.print(f"namespace {record['namespace'][:8]} {safe(record['label'])}, depth {record['depth'] or 'unknown'}", soft_wrap=True)
    to.print(f"above: {count_text(len(above), 'page')} up to {end}" + (f" [dim]({some})[/]" if above else ""), soft_wrap=True)
    to.print(f"below: {len(record['children'])} children, {count_text(record['pages_below'], 'page')} in all", soft_wrap=True)
    to.print(rows.header(), markup=False, soft_wrap=True)
    for text, found in zip(lines, record["objects"], strict=True):
        outcome = found["verified"]
        judged = {None: "", "hit": "  [green]verified[/]", "corrupt": "  [red]CORRUPT[/]"}.get(outcome, f"  [yellow]{outcome}[/]")
        to.print(safe(text) + judged, soft_wrap=True)


def _namespace(store: StorageBackend, names: Namespaces, text: str, limit: int, output: Output) -> None:
    everything = Forest(store.scan_all())
    chosen = names.one(text, {page.namespace for page in everything.pages.values()})
    forest = Forest(entry for page in everything.pages.values() for entry in page.entries if entry.meta.namespace == chosen)
    runs = runs_of(forest, forest.roots)
    if output is Output.TABLE:
        tree = Tree(f"[bold]{safe(names.named(chosen))}[/] {summary(forest, forest.order)}")
        plant(tree, runs, limit)
        console().print(tree, soft_wrap=True)
    elif output is Output.JSON:
        document({**names.record(chosen), "runs": [run.record(n) for n, run in enumerate(runs)]})
    else:
        for n, run in enumerate(runs):
            line(run.record(n))


def _prompt(store: StorageBackend, names: Namespaces, text: str, prompt: TokenArray, extra: bytes, limit: int, output: Output) -> None:
    forest = Forest(store.scan_all())
    chosen = [names.one(text, names.records)] if text else sorted(names.records)
    paths = []
    for namespace in chosen:
        size = names.identity(namespace).get("page_size")
        if isinstance(size, int) and not isinstance(size, bool) and 0 < size < 2**32:
            path = follow(forest, namespace, prompt, size, extra)
            if text or path.matched:
                paths.append(path)
        elif text:
            raise InputError(
                f"namespace {names.named(namespace)} does not say its page size, so a prompt cannot be cut into pages; use KEY"
            )
    records = [{**names.record(path.namespace), **path.record()} for path in paths]
    if output is Output.JSON:
        document(records)
    elif output is Output.JSONL:
        for record in records:
            line(record)
    else:
        for path in paths:
            console().print(draw(path, safe(names.named(path.namespace)), limit), soft_wrap=True)
        if not paths:
            console().print(f"{count_text(len(prompt), 'token')}: no namespace has a page of this prompt", markup=False)

"""The verb `tiercache inspect`: shows a page, the tree of a namespace, or the stored part of a prompt."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

import typer
from rich.tree import Tree

from tiercache.cli.store.batches import ObjectReader
from tiercache.cli.store.forest import Forest
from tiercache.cli.store.names import Namespaces, check_hex, object_header, object_record, object_row, one_key
from tiercache.cli.store.options import MacKeyOption, StoresOption
from tiercache.cli.store.prompt import (
    ExtraOption,
    TextFileOption,
    TextOption,
    TokenizerOption,
    TokensOption,
    check_one_prompt,
    extra_of,
    prompts_given,
    tokens_of,
)
from tiercache.cli.store.target import Target, check_answered, opened, resolve_all
from tiercache.cli.store.trees import add_runs, draw, follow, runs_of, summary
from tiercache.cli.terminal import (
    SHORT,
    Exit,
    Output,
    OutputOption,
    console,
    count_text,
    document,
    line,
    safe,
    whole,
)
from tiercache.core import Outcome, TokenArray
from tiercache.errors import ConfigError, InputError
from tiercache.storage.base import StorageBackend

_KEY_DIGITS: Final = 64
"""Hex digits of a page key. An object's key (layout and page key) has twice as many."""
_CHAIN: Final = 3
"""Number of ancestors of a page that a table shows; JSON has all."""


def inspect(
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY",
            help="First digits of a page key, or all 128 digits of an object's key.",
            show_default=False,
        ),
    ] = "",
    store: StoresOption = None,
    namespace: Annotated[
        str, typer.Option(help="Show the tree of this namespace; with a prompt: search only there.")
    ] = "",
    tokens: TokensOption = "",
    text: TextOption = None,
    text_file: TextFileOption = "",
    tokenizer: TokenizerOption = "",
    extra: ExtraOption = "",
    verify: Annotated[
        bool, typer.Option("--verify", help="Read and check the page's objects; a daemon drops corrupt ones.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of lines of a tree.")] = 500,
    mac_key: MacKeyOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Show one page and its objects, the tree of a namespace, or how much of a prompt could be restored.

    Show a page of a stopped store, and check its objects; show everything
    stored of a model; show what a daemon has of a prompt:

        tiercache inspect 3fa9c2 -s /var/lib/tiercache --verify

        tiercache inspect --namespace qwen3 -s /var/lib/tiercache

        tiercache inspect --text-file p.txt --tokenizer /models/q3 -s grpc://n7:7070

    JSON fields of a page: page_key, namespace, label, depth, objects (the
    fields of ls, and verified: the outcome, such as hit or corrupt; null
    without --verify), chain (keys of the page's ancestors, nearest first),
    chain_ends (root, missing or unknown), missing (key of the missing page),
    children, pages_below.

    JSON fields of a namespace: namespace, label, identity, runs (run,
    parent_run, first_depth, last_depth, first_page, last_page, pools, states,
    bytes, orphan, missing). jsonl has one line for each run.

    JSON fields of a prompt, for each namespace that has pages of the prompt:
    namespace, label, identity, page_size, tokens, pages, matched_pages, layouts
    (present: ranges of depths), restorable (pages, tokens), branches, orphans,
    page_keys. Depths count pages, from 1.
    """
    prompts = prompts_given(tokens, text, text_file)
    _check_use(key, namespace, prompts, verify, extra, tokenizer)
    digits = check_hex(key, "KEY", 2 * _KEY_DIGITS) if key else ""
    extra_bytes = extra_of(extra)
    prompt = tokens_of(tokens, text, text_file, tokenizer) if prompts else None
    target = resolve_all(store, mac_key)
    with opened(target) as found:
        names = Namespaces.of(found)
        if prompt is not None:
            _prompt(found, names, namespace, prompt, extra_bytes, limit, output)
        elif namespace:
            _namespace(found, names, namespace, limit, output)
        else:
            _page(target, found, names, digits, verify, output)


def _check_use(
    key: str, namespace: str, prompts: list[str], verify: bool, extra: str, tokenizer: str
) -> None:
    if not (key or namespace or prompts):
        raise ConfigError(
            "inspect needs a page KEY, a --namespace or a prompt (--tokens, --text or --text-file);"
            " `tiercache ls` shows keys"
        )
    check_one_prompt(prompts)
    if key and (namespace or prompts):
        raise ConfigError("a KEY already names one page; omit --namespace and the prompt")
    if verify and not key:
        raise ConfigError("--verify needs a KEY; use `tiercache verify --namespace` for more than one page")
    if extra and not prompts:
        raise ConfigError("--extra needs a prompt; give --tokens, --text or --text-file too")
    if tokenizer and not prompts:
        raise ConfigError("--tokenizer needs --text or --text-file; give one of them")


def _page(
    target: Target, store: StorageBackend, names: Namespaces, digits: str, verify: bool, output: Output
) -> None:
    forest = Forest(store.scan_all())
    page = forest.pages[_page_key(forest, digits)]
    entries = [
        entry
        for entry in page.entries
        if len(digits) <= _KEY_DIGITS or entry.key.digest.hex().startswith(digits)
    ]
    outcomes: list[str | None] = [None] * len(entries)
    if verify:
        found = [checked.outcome for batch in ObjectReader(store).check(entries) for checked in batch]
        check_answered(target, found)
        outcomes = [str(outcome) for outcome in found]
    ends, missing = forest.end_of(page.key)
    record = {
        "page_key": page.key.hex(),
        "namespace": page.namespace.hex(),
        "label": names.label(page.namespace),
        "depth": page.depth,
        "objects": [
            {**object_record(entry), "verified": outcome}
            for entry, outcome in zip(entries, outcomes, strict=True)
        ],
        "chain": [above.hex() for above in forest.chain(page.key)],
        "chain_ends": ends,
        "missing": None if missing is None else missing.hex(),
        "children": [child.hex() for child in page.children],
        "pages_below": len(forest.below([page.key])) - 1,
    }
    if output is Output.TABLE:
        _print(record, [object_row(entry, time.time()) for entry in entries])
    else:
        whole(record, output)
    if Outcome.CORRUPT in outcomes:
        raise typer.Exit(Exit.CORRUPT)


def _page_key(forest: Forest, digits: str) -> bytes:
    """Return the key of the page that `digits` name.

    `digits` are the first digits of the page key, or all digits of the key of one of the page's objects.
    """
    if len(digits) <= _KEY_DIGITS:
        return one_key(digits, forest.pages, "KEY")
    if len(digits) < 2 * _KEY_DIGITS:
        raise ConfigError(
            f"KEY has {len(digits)} digits; a page key has 64, and an object's key (layout and page key) 128"
        )
    key = one_key(digits[_KEY_DIGITS:], forest.pages, "KEY")
    if not any(entry.key.digest.hex() == digits for entry in forest.pages[key].entries):
        raise ConfigError(
            f"KEY {digits[:SHORT]}... names a stored page in a layout that is not stored; give the page key"
            " alone to see it"
        )
    return key


def _print(record: dict[str, Any], lines: list[str]) -> None:
    to = console()
    above = record["chain"]
    if record["chain_ends"] == "missing":
        end = f"[red]page {record['missing'][:SHORT]}, which is missing: an ORPHAN[/]"
    else:
        end = "the root" if record["chain_ends"] == "root" else "a page that does not record its parent"
    some = " > ".join(key[:SHORT] for key in above[:_CHAIN]) + (" > ..." if len(above) > _CHAIN else "")
    to.print(f"[bold]page {record['page_key']}[/]", soft_wrap=True)
    to.print(
        f"namespace {record['namespace'][:8]} {safe(record['label'])}, depth {record['depth'] or 'unknown'}",
        soft_wrap=True,
    )
    to.print(
        f"above: {count_text(len(above), 'page')} up to {end}" + (f" [dim]({some})[/]" if above else ""),
        soft_wrap=True,
    )
    to.print(
        f"below: {len(record['children'])} children, {count_text(record['pages_below'], 'page')} in all",
        soft_wrap=True,
    )
    tiers = any(found["tier"] for found in record["objects"])
    to.print(object_header(tiers=tiers), markup=False, soft_wrap=True)
    for text, found in zip(lines, record["objects"], strict=True):
        outcome = found["verified"]
        judged = {None: "", "hit": "  [green]verified[/]", "corrupt": "  [red]CORRUPT[/]"}.get(
            outcome, f"  [yellow]{outcome}[/]"
        )
        to.print(safe(text) + judged, soft_wrap=True)


def _namespace(store: StorageBackend, names: Namespaces, text: str, limit: int, output: Output) -> None:
    everything = Forest(store.scan_all())
    chosen = names.one(text, {page.namespace for page in everything.pages.values()})
    forest = Forest(
        entry
        for page in everything.pages.values()
        for entry in page.entries
        if entry.meta.namespace == chosen
    )
    runs = runs_of(forest, forest.roots)
    if output is Output.TABLE:
        tree = Tree(f"[bold]{safe(names.named(chosen))}[/] {summary(forest, forest.order)}")
        add_runs(tree, runs, limit)
        console().print(tree, soft_wrap=True)
    elif output is Output.JSON:
        document({**names.record(chosen), "runs": [run.record(n) for n, run in enumerate(runs)]})
    else:
        for n, run in enumerate(runs):
            line(run.record(n))


def _prompt(
    store: StorageBackend,
    names: Namespaces,
    text: str,
    prompt: TokenArray,
    extra: bytes,
    limit: int,
    output: Output,
) -> None:
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
                f"namespace {names.named(namespace)} has no page size on record, so a prompt cannot be"
                " cut into pages; use KEY"
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
            console().print(
                f"{count_text(len(prompt), 'token')}: no namespace has a page of this prompt", markup=False
            )

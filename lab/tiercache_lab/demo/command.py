"""The verb `tiercache demo`, which serves conversations in two server processes and checks every answer.

The second process continues the conversations of the first. If only one process can have the store open, the
first process is killed before the second begins.

To check an answer, the server computes the answer again from its tokens, without restored data.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tiercache import errors
from tiercache.cli.readiness import require_disk, require_place
from tiercache.cli.terminal import (
    Exit,
    Output,
    OutputOption,
    UnreachableError,
    document,
    line,
    records,
    table,
)
from tiercache.config import parse_size
from tiercache.errors import ConfigError, MissingExtraError, StorageError, TierCacheError
from tiercache.storage.registry import capabilities_of, check_backend, open_backend, spec_of
from tiercache_lab import children

_COLUMNS: Final = ("chat, turn", "from", "restored", "1st token", "recompute", "gain", "diff", "answer")
_LEGEND: Final = (
    "restored: tokens of the prompt. recompute: a prefill in one pass after a warm-up (median of 5). diff:"
    " largest logit difference from a recompute with the same cuts (the same passes). cold: the page cache"
    " was dropped."
)
SERVER: Final = "tiercache_lab.demo.serving"
TIMED: Final = {
    "speed-host": "from host",
    "speed-disk": "from disk",
    "speed-disk-cold": "disk, cold",
    "speed-storage": "from storage",
}
"""Names, in the table, of the phases in which restores are timed."""


@dataclass
class DemoResult:
    """Reports collected from the two server processes."""

    store: str = "disk"
    """Name of the lowest tier: "disk", or "storage" if the store is given by a URL."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Events `row`, one for each request."""
    tiers: list[str] = field(default_factory=list)
    """Names of the tiers below the host, the fastest first."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """Events `run`, one for each request of a conversation."""
    figures: dict[str, float] = field(default_factory=dict)
    """Values of the event `summary`."""

    @property
    def hits(self) -> dict[str, int]:
        """Number of requests per tier. A request counts for the slowest tier from which it was restored."""
        return {
            tier: sum(row["tier"] == tier for row in self.rows) for tier in ("device", "host", *self.tiers)
        }

    @property
    def wrong(self) -> int:
        """Number of requests that differ from their recompute.

        Restored bytes, logits and text must be bitwise equal.
        """
        return sum(
            not (row["same_text"] and row["same_bytes"] and row["max_logit_diff"] == 0.0) for row in self.rows
        )

    @property
    def restart_hits(self) -> int:
        """Number of requests for which the second process read what the first one had stored."""
        return sum(row["phase"] == "restart" and row["tier"] in self.tiers for row in self.rows)

    def faults(self) -> list[str]:
        """Return the reasons why the demonstration failed, or an empty list if it passed."""
        faults = (
            [f"{self.wrong} of {len(self.rows)} answers differ from their recompute"] if self.wrong else []
        )
        hits = self.hits
        if self.store == "storage":  # which tiers of a chain from outside are needed depends on their sizes
            hits = {**hits, **dict.fromkeys(self.tiers, sum(hits[tier] for tier in self.tiers))}
        faults += [f"nothing was restored from {tier}" for tier, n in hits.items() if not n]
        if not self.restart_hits:
            faults.append("the second process restored nothing that the first had stored")
        return faults

    def summary(self) -> dict[str, Any]:
        """Return the `summary` object of the JSON report."""
        return {
            "wrong_outputs": self.wrong,
            "hits_by_tier": self.hits,
            "faults": self.faults(),
            **self.figures,
        }


def demo(
    model: Annotated[
        str,
        typer.Option(
            help="Directory of a Hugging Face model. Default: a small Qwen3-Next with random weights."
        ),
    ] = "",
    directory: Annotated[
        Path | None,
        typer.Option(
            "--directory",
            "-d",
            help="Directory of the store, which is kept. Default: a temporary directory, which is removed.",
        ),
    ] = None,
    disk_bytes: Annotated[str, typer.Option(help="Capacity of the store on disk.")] = "1GiB",
    turns: Annotated[
        int,
        typer.Option(
            min=1,
            help="Turns of each conversation before the kill. After the kill, each conversation has one more"
            " turn, and the last conversation has two.",
        ),
    ] = 4,
    conversations: Annotated[
        int, typer.Option(min=1, help="Number of conversations, which share a system prompt.")
    ] = 4,
    context: Annotated[
        int, typer.Option(min=256, help="Length in tokens of the prompt whose restore is timed.")
    ] = 4096,
    device: Annotated[
        str,
        typer.Option(
            help=(
                "Device of the model and of the first tier: cpu, cuda, or cuda:N for one of several GPUs."
                " CUDA needs the extra cuda."
            )
        ),
    ] = "cpu",
    storage: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "URL of a store, such as grpc:///var/lib/tiercache/run. Repeat the option for a chain of"
                " tiers, the fastest first. Default: a store on disk."
            )
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Serve conversations, kill the process, continue them in a second process, and check every answer.

    Pages and states go through device, host and a store on disk.

    Every answer is recomputed from its tokens with the same cuts (the same forward passes). Restored bytes,
    logits and text must be bitwise equal. Exit code 4: an answer differs. Exit code 6: from one of the tiers
    nothing was restored, or the second process restored nothing that the first had stored.

    Run two workers that share a daemon (`tiercache serve`). The second worker continues the conversations of
    the first:

        tiercache demo --storage grpc:///var/lib/tiercache/run

    If only one process can have the store open, as is so with file://, the first worker is killed before the
    second begins.

    JSON fields: rows (one for each request: phase, conversation, turn, tier, tokens_prompt, tokens_restored,
    bytes_restored, times, max_logit_diff, same_text, same_bytes) and summary (wrong_outputs, hits_by_tier,
    faults, speeds). With jsonl, there is one line for each row, and a last line with summary.
    """
    console = Console(stderr=output is not Output.TABLE, emoji=False)
    if not console.is_terminal:
        console = Console(width=100, stderr=output is not Output.TABLE, emoji=False)
    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        raise MissingExtraError("the demo", "worker", ModuleNotFoundError(name=missing[0]))
    _require_device(device)
    if model and not Path(model).is_dir():
        raise ConfigError(
            f"--model {model} is not a directory; give one made by `save_pretrained` or by a download"
        )
    urls = storage or []
    shared = bool(urls) and _require_answer(urls)
    capacity = parse_size(disk_bytes)
    if directory is not None:
        require_place(directory, "--directory")
    # The temporary directory has no name yet; no other process has one with this name.
    place = directory or Path(tempfile.gettempdir()) / f"tiercache-demo-{os.getpid()}"
    list(require_disk(place, "--disk-bytes", capacity))
    check_backend({"type": "file", "path": os.path.abspath(place / "store"), "capacity": capacity})
    result = DemoResult("storage" if urls else "disk")
    first, second = "serving, then kill -9", "second process"
    if shared:
        first, second = "first worker", "second worker"
    with _progress(console) as progress, ExitStack() as others:
        if directory is None:
            where = others.enter_context(tempfile.TemporaryDirectory(prefix="tiercache-demo-"))
        else:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            where = str(directory)
        plan = {
            "directory": where, "model": model, "disk_bytes": capacity, "turns": turns,
            "conversations": conversations, "context": context, "storage": urls, "device": device,
            "shared": shared, "salt": secrets.token_hex(8),
        }  # fmt: skip
        _run(plan | {"phase": "serve"}, first, result, progress, others)
        _run(plan | {"phase": "restart", "runs": result.runs}, second, result, progress, others)
    if output is Output.TABLE:
        console.print("Source of each prompt, and the check of its answer", style="bold")
        console.print(_table(result, "second process" if shared else "after kill -9"))
        console.print(_LEGEND, style="dim")
        _print_verdict(console, result)
    elif output is Output.JSON:
        document({"rows": result.rows, "summary": result.summary()})
    else:
        records(result.rows, output)
        line({"summary": result.summary()})
    if result.faults():
        raise typer.Exit(Exit.CORRUPT if result.wrong else Exit.NO)


def _require_device(name: str) -> None:
    """Raise ConfigError for a device name that is not known, or for CUDA without CuPy.

    Whether the device exists can be found out only with torch, so the serving process does that.
    """
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise ConfigError(f"--device {name} is not known; use cpu, cuda, or cuda:N for one of several")
    if name != "cpu" and find_spec("cupy") is None:
        raise MissingExtraError(f"--device {name}", "cuda", ModuleNotFoundError(name="cupy"))


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[doing]}"),
        console=console,
    )  # fmt: skip


def _require_answer(urls: Sequence[str]) -> bool:
    """Return whether two processes can have the store open at once.

    Raises UnreachableError unless the store answers: a worker would run without it and restore nothing from
    it. Raises ConfigError if a second process would find nothing of what the first has stored.
    """
    able = [capabilities_of(url) for url in urls]
    if not any(tier.shared or tier.persistent for tier in able):
        raise ConfigError(
            f"the store --storage {' --storage '.join(urls)} ends with the process that opened it, and the"
            " second process would find nothing; name a store on disk, or one that processes share"
        )
    try:
        with open_backend(spec_of(urls)) as store:
            store.namespaces()
    except StorageError as error:
        raise UnreachableError(f"--storage {' --storage '.join(urls)} does not answer: {error}") from error
    return all(tier.shared for tier in able)


def _run(plan: dict[str, Any], title: str, result: DemoResult, progress: Progress, others: ExitStack) -> None:
    """Start a server process, send it the plan, and collect its events in `result`.

    If only one process can have the store open, this one is killed as soon as it reports that everything is
    stored. Otherwise it goes on and is killed when `others` is closed.
    """
    task = progress.add_task(title, total=None, doing="loading the model")
    stderr = others.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
    server = others.enter_context(
        subprocess.Popen(  # noqa: S603
            children.command(SERVER), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    )
    others.callback(server.kill)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(plan))
    server.stdin.close()
    settled = _follow(server.stdout, result, progress, task)
    if settled and not plan["shared"]:
        server.kill()
        server.wait()
    if not settled and (code := server.wait()):
        stderr.seek(0)
        raise _failure(stderr.read(), code)
    progress.update(task, doing="done")


def _follow(events: Iterable[str], result: DemoResult, progress: Progress, task: TaskID) -> bool:
    """Process a server's events up to `settled`, and return whether this event came.

    `settled` means that everything is stored, so that the server can be killed.
    """
    for told in events:
        event = json.loads(told)
        kind = event.pop("event")
        if kind == "start":
            progress.update(task, total=event["steps"], doing="")
            result.tiers = event["tiers"]
            for said in event["about"]:
                progress.console.print(said, style="dim", highlight=False, markup=False)
        elif kind == "row":
            result.rows.append(event)
            progress.update(
                task, advance=1, doing=f"from {event['tier']}" if event["tokens_restored"] else "a miss"
            )
        elif kind == "step":
            progress.update(task, advance=1, doing=event["what"])
        elif kind == "run":
            result.runs.append(event)
        elif kind == "summary":
            result.figures = event
        elif kind == "settled":
            return True
    return False


def _failure(stderr: str, code: int) -> TierCacheError:
    """Return the error that ended a server process.

    A TierCacheError of the server keeps its type and message. Python writes it to stderr as a last line
    "tiercache.errors.Name: message".
    """
    lines = [line for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "no message"
    name, _, message = last.partition(": ")
    kind = getattr(errors, name.removeprefix("tiercache.errors."), None)
    if isinstance(kind, type) and issubclass(kind, TierCacheError):
        return kind(message)
    return TierCacheError(f"the serving process ended with code {code}: {last}")


def _table(result: DemoResult, second: str) -> Table:
    shown = table(_COLUMNS, left=("chat, turn", "from", "answer"))
    phase = ""
    for row in result.rows:
        title = {"serve": "first process", "restart": second}.get(row["phase"], "timed")
        if title != phase:
            phase = title
            shown.add_section()
            shown.add_row(f"[bold]{title}")
        shown.add_row(
            TIMED.get(row["phase"]) or f"{row['conversation']}, {row['turn']}",
            row["tier"],
            str(row["tokens_restored"]),
            f"{row['ttft_ms']:.0f} ms",
            f"{row['ttft_recompute_ms']:.0f} ms",
            f"{row['ttft_recompute_ms'] / row['ttft_ms']:.1f} x",
            f"{row['max_logit_diff']:g}",
            "[green]same[/]" if row["same_text"] and row["same_bytes"] else "[red]DIFFERS[/]",
        )
    return shown


def _print_verdict(console: Console, result: DemoResult) -> None:
    figures = result.figures
    hits = ", ".join(f"{n} from {tier}" for tier, n in result.hits.items())
    console.print(
        f"{len(result.rows)} requests: {hits}; {result.restart_hits} requests of the second process continued"
        " what the first had stored."
    )
    if figures:
        cold = figures.get("speedup_disk_cold")
        console.print(
            f"First token at {result.rows[-1]['tokens_prompt']} tokens: {figures['speedup_host']:.1f} x"
            f" faster from host, {figures[f'speedup_{result.store}']:.1f} x from"
            f" {result.store}{f', {cold:.1f} x with the page cache dropped' if cold else ''}."
            f" Restored at {figures['restore_gbps']:.2f} GB/s."
        )
    faults = result.faults()
    if faults:
        console.print(f"[red bold]FAILED:[/] {'; '.join(faults)}.")
    else:
        console.print(
            "[green bold]PASSED:[/] every restored byte, every logit and every answer equals its recompute"
            " with the same cuts."
        )

"""The `tiercache demo` command: serve, kill and resume conversations, and check every answer against a recompute."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tiercache import errors
from tiercache.cli import children
from tiercache.cli.exits import Exit, UnreachableError
from tiercache.cli.output import Output, OutputOption, document, line, records
from tiercache.cli.readiness import require_disk, require_memory, require_place
from tiercache.config import parse_size
from tiercache.errors import ConfigError, StorageError, TierCacheError
from tiercache.storage.registry import open_backend

_COLUMNS: Final = ("chat, turn", "from", "restored", "computed", "1st token", "recompute", "gain", "diff", "uncut", "answer")
_WIDE: Final = 95
"""Terminal width, in columns, from which all of `_COLUMNS` are shown; a narrower table leaves out two of them."""
_LEGEND: Final = (
    "restored, computed: tokens of the prompt. recompute: one warmed, uncut prefill (median of 5). diff: largest logit difference to a "
    "recompute with the same cuts; uncut: to one without cuts, which rounds differently. cold: page cache dropped."
)
SERVER: Final = "tiercache.integrations.transformers.demo"
TIMED: Final = {"speed-host": "from host", "speed-disk": "from disk", "speed-disk-cold": "disk, cold", "speed-storage": "from storage"}


@dataclass
class Result:
    """Reports collected from the two server processes.

    `store` is the name of the lowest tier: "disk", or "storage" when the demo runs on a store given by URL.
    """

    store: str = "disk"
    rows: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def hits(self) -> dict[str, int]:
        """Number of requests by the slowest tier that each of them needed."""
        return {tier: sum(row["tier"] == tier for row in self.rows) for tier in ("device", "host", self.store)}

    @property
    def wrong(self) -> int:
        """Number of answers that differ from their recompute in restored bytes, logits or text; equal means bit for bit."""
        return sum(not (row["same_text"] and row["same_bytes"] and row["max_logit_diff"] == 0.0) for row in self.rows)

    @property
    def restart_hits(self) -> int:
        """Number of requests that the second process restored from the store that the first one had filled."""
        return sum(row["phase"] == "restart" and row["tier"] == self.store for row in self.rows)

    def faults(self) -> list[str]:
        """Return the reasons why the demonstration failed; empty if it passed."""
        faults = [f"{self.wrong} of {len(self.rows)} answers differ from their recompute"] if self.wrong else []
        faults += [f"nothing was restored from {tier}" for tier, n in self.hits.items() if not n]
        if not self.restart_hits:
            faults.append("the second process restored nothing that the first had stored")
        return faults

    def summary(self) -> dict[str, Any]:
        """Return the `summary` object of the JSON report."""
        return {"wrong_outputs": self.wrong, "hits_by_tier": self.hits, "faults": self.faults(), **self.figures}


def demo(
    model: Annotated[str, typer.Option(help="Directory of a Hugging Face model. Default: a small Qwen3-Next with random weights.")] = "",
    directory: Annotated[
        Path | None, typer.Option("--directory", "-d", help="Where the store goes; kept afterwards. Default: a temporary one, removed.")
    ] = None,
    device_bytes: Annotated[str, typer.Option(help="Size of the device pools, such as 16MiB; auto: one conversation and a bit.")] = "auto",
    host_bytes: Annotated[str, typer.Option(help="Size of the host arena; auto: about two conversations.")] = "auto",
    disk_bytes: Annotated[str, typer.Option(help="Capacity of the store on disk.")] = "1GiB",
    turns: Annotated[
        int, typer.Option(min=1, help="Turns of each conversation before the kill; one more follows, two in the last one.")
    ] = 4,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations behind one system prompt.")] = 4,
    context: Annotated[int, typer.Option(min=256, help="Tokens of the prompt whose restore is timed.")] = 4096,
    device: Annotated[
        str,
        typer.Option(
            help="Where the model runs and the first tier lies: cpu, cuda, or cuda:N for one of several. CUDA needs pip install "
            "'tiercache\\[cuda]'."
        ),
    ] = "cpu",
    storage: Annotated[
        str, typer.Option(help="URL of a store that both processes have open, such as grpc:///var/lib/tiercache/run. Default: one on disk.")
    ] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write rows and summary here as well.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Serve conversations through device, host and disk, kill the process, go on in a second one, and check every answer.

    Every answer is recomputed from its tokens with the same cuts: restored bytes, logits and text must be equal to the last bit.
    Exit code 4 if one is not, 6 if a tier was never needed.

    Two workers that share a daemon (`tiercache serve`), where the second goes on with what the first has stored:

        tiercache demo --storage grpc:///var/lib/tiercache/run

    JSON fields: rows (a request each: phase, conversation, turn, tier, tokens_prompt, tokens_restored, bytes_restored, times,
    max_logit_diff, same_text, same_bytes) and summary (wrong_outputs, hits_by_tier, faults, speeds). With jsonl a line for each of rows,
    and a last line with summary.
    """
    console = Console(stderr=output is not Output.TABLE, emoji=False)
    if not console.is_terminal:
        console = Console(width=100, stderr=output is not Output.TABLE, emoji=False)
    if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        raise ConfigError(f"the demo runs a model and needs {' and '.join(missing)}; install them with: pip install 'tiercache[worker]'")
    _require_device(device)
    if model and not Path(model).is_dir():
        raise ConfigError(f"--model {model} is not a directory; pass one that `save_pretrained` or a download made")
    if json_file is not None and (json_file.is_dir() or not json_file.parent.is_dir()):
        raise ConfigError(f"--json {json_file} is a directory, or its directory does not exist; name a file in a directory that is there")
    if storage:
        _require_answer(storage)
    sizes = {"device_bytes": _size(device_bytes), "host_bytes": _size(host_bytes), "disk_bytes": parse_size(disk_bytes)}
    _require_room(sizes, device, directory or Path(tempfile.gettempdir()))
    with _directory(directory) as where:
        plan = sizes | {
            "directory": str(where), "model": model, "turns": turns, "conversations": conversations, "context": context, "storage": storage,
            "device": device,
        }  # fmt: skip
        result = Result("storage" if storage else "disk")
        with _progress(console) as progress, ExitStack() as others:
            _run(plan | {"phase": "serve"}, "first worker" if storage else "serving, then kill -9", result, progress, others)
            _run(plan | {"phase": "restart"}, "second worker" if storage else "second process", result, progress, others)
    if output is Output.TABLE:
        console.print(_table(result, console.width, "second process" if storage else "after kill -9"))
        console.print(_LEGEND, style="dim")
        _say_verdict(console, result)
    report = {"rows": result.rows, "summary": result.summary()}
    if output is Output.JSON:
        document(report)
    elif output is Output.JSONL:
        records(result.rows, output)
        line({"summary": report["summary"]})
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    if result.faults():
        raise typer.Exit(Exit.CORRUPT if result.wrong else Exit.NO)


def _require_device(name: str) -> None:
    """Raise ConfigError for a device name that is not known, or for CUDA without CuPy.

    Only the serving process finds out whether the device exists: asking for it means loading torch.
    """
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise ConfigError(f"--device {name} is not known; use cpu, cuda, or cuda:N for one of several")
    if name != "cpu" and find_spec("cupy") is None:
        raise ConfigError(f"--device {name} needs CuPy to copy between it and the host; install it with: pip install 'tiercache[cuda]'")


def _require_room(sizes: dict[str, int], device: str, directory: Path) -> None:
    """Raise ConfigError for sizes that this machine cannot have, before anything is created."""
    pools = [("--device-bytes", sizes["device_bytes"])] if device == "cpu" else []
    list(require_memory(("--host-bytes", sizes["host_bytes"]), *pools))
    list(require_disk(directory, "--disk-bytes", sizes["disk_bytes"]))


def _size(text: str) -> int:
    """Return `text` as bytes; 0 stands for "auto"."""
    return 0 if text == "auto" else parse_size(text)


@contextmanager
def _directory(given: Path | None) -> Iterator[Path]:
    if given is not None:
        require_place(given, "--directory")
        given.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="tiercache-demo-") as temporary:
        yield Path(temporary)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("[dim]{task.fields[doing]}"),
        console=console,
    )  # fmt: skip


def _require_answer(url: str) -> None:
    """Raise UnreachableError unless the store answers, and ConfigError unless two processes can share it.

    A worker whose store does not answer would carry on without it and restore nothing.
    """
    with open_backend(url) as store:
        if not store.capabilities.shared:
            raise ConfigError(f"--storage {url} is no store that two processes can have open; name a daemon's, or an lmdb store")
        try:
            store.namespaces()
        except StorageError as error:
            raise UnreachableError(f"--storage {url} cannot be asked: {error}") from error


def _run(plan: dict[str, Any], title: str, result: Result, progress: Progress, others: ExitStack) -> None:
    """Run one server process: send it the plan, and collect its events in `result`.

    The process is killed once it reports that everything is stored: immediately, or, if the store is shared, when `others` is closed.
    """
    task = progress.add_task(title, total=None, doing="loading the model")
    stderr = others.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
    server = others.enter_context(
        subprocess.Popen(children.command(SERVER), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True)  # noqa: S603  our own module
    )
    others.callback(server.kill)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(plan))
    server.stdin.close()
    settled = _follow(server.stdout, result, progress, task)
    if settled and not plan["storage"]:
        server.kill()
        server.wait()
    if not settled and (code := server.wait()):
        stderr.seek(0)
        raise _failure(stderr.read(), code)
    progress.update(task, doing="done")


def _follow(events: Iterable[str], result: Result, progress: Progress, task: TaskID) -> bool:
    """Process a server's events until they end; return True as soon as the server asks, by `settled`, to be killed."""
    for told in events:
        event = json.loads(told)
        kind = event.pop("event")
        if kind == "start":
            progress.update(task, total=event["steps"], doing="")
            for said in event["about"]:
                progress.console.print(said, style="dim", highlight=False, markup=False)
        elif kind == "row":
            result.rows.append(event)
            progress.update(task, advance=1, doing=f"from {event['tier']}" if event["tokens_restored"] else "a miss")
        elif kind == "step":
            progress.update(task, advance=1, doing=event["what"])
        elif kind == "summary":
            result.figures = event
        elif kind == "settled":
            return True
    return False


def _failure(stderr: str, code: int) -> TierCacheError:
    """Return the error that ended a server process, with its original type and message where it is a TierCacheError."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else "no message"
    name, _, message = last.partition(": ")
    kind = getattr(errors, name.removeprefix("tiercache.errors."), None)
    if isinstance(kind, type) and issubclass(kind, TierCacheError):
        return kind(message)
    return TierCacheError(f"the serving process ended with code {code}: {last}")


def _table(result: Result, width: int, second: str) -> Table:
    table = Table(
        title="Where each prompt came from, and what its answer was checked against",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    columns = [n for n, name in enumerate(_COLUMNS) if width >= _WIDE or name not in ("computed", "uncut")]
    for name in (_COLUMNS[n] for n in columns):
        table.add_column(name, justify="left" if name in ("chat, turn", "from", "answer") else "right", no_wrap=True)
    phase = ""
    for row in result.rows:
        title = {"serve": "first process", "restart": second}.get(row["phase"], "timed")
        if title != phase:
            phase = title
            table.add_section()
            table.add_row(f"[bold]{title}")
        cells = _cells(row)
        table.add_row(*(cells[n] for n in columns))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        TIMED.get(row["phase"]) or f"{row['conversation']}, {row['turn']}",
        row["tier"],
        str(row["tokens_restored"]),
        str(row["tokens_prompt"] - row["tokens_restored"]),
        f"{row['ttft_ms']:.0f} ms",
        f"{row['ttft_recompute_ms']:.0f} ms",
        f"{row['ttft_recompute_ms'] / row['ttft_ms']:.1f} x",
        f"{row['max_logit_diff']:g}",
        f"{row['max_logit_diff_uncut']:.0e}",
        "[green]same[/]" if row["same_text"] and row["same_bytes"] else "[red]DIFFERS[/]",
    ]


def _cold(figures: dict[str, float]) -> str:
    return f", {figures['speedup_disk_cold']:.1f} x with the page cache dropped" if "speedup_disk_cold" in figures else ""


def _of_plain(figures: dict[str, float]) -> str:
    return f", {figures['restore_gbps'] / figures['raw_read_gbps']:.2f} of a plain read" if "raw_read_gbps" in figures else ""


def _say_verdict(console: Console, result: Result) -> None:
    figures = result.figures
    hits = ", ".join(f"{n} from {tier}" for tier, n in result.hits.items())
    console.print(
        f"{len(result.rows)} requests: {hits}; {result.restart_hits} requests of the second process continued what the first had stored."
    )
    if figures:
        console.print(
            f"First token at {result.rows[-1]['tokens_prompt']} tokens: {figures['speedup_host']:.1f} x faster from host, "
            f"{figures[f'speedup_{result.store}']:.1f} x from {result.store}{_cold(figures)}. "
            f"Restored at {figures['restore_gbps']:.2f} GB/s{_of_plain(figures)}."
        )
    faults = result.faults()
    if faults:
        console.print(f"[red bold]FAILED:[/] {'; '.join(faults)}.")
    else:
        console.print("[green bold]PASSED:[/] every restored byte, every logit and every answer equals its recompute with the same cuts.")

"""The options of `tiercache prove`, and the order in which it works."""

from __future__ import annotations

import math
import secrets
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tiercache.cli.exits import Exit
from tiercache.cli.output import Output, OutputOption, console, safe, whole
from tiercache.cli.prove.engines import EngineChoice, find
from tiercache.cli.prove.run import Run
from tiercache.cli.prove.saved import LEAST_TOKENS, MOST_ANSWER, MOST_TOKENS, Saved, check_place, load
from tiercache.cli.prove.server import Server
from tiercache.cli.prove.show import heading, show, write
from tiercache.cli.prove.verdict import EXITS
from tiercache.errors import ConfigError


def prove(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server of SGLang or vLLM itself, not a router before several.")],
    model: Annotated[str, typer.Option(help="Which of the server's models to ask. Default: its first.")] = "",
    engine: Annotated[EngineChoice, typer.Option(help="Which engine answers; auto takes its word.")] = EngineChoice.AUTO,
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", metavar="KEY", show_default=False, help="The server's key; better by the variable.")
    ] = "",
    admin_key: Annotated[
        str, typer.Option(envvar="SGLANG_ADMIN_API_KEY", metavar="KEY", show_default=False, help="SGLang's --admin-api-key, if it has one.")
    ] = "",
    tokens: Annotated[int, typer.Option(min=LEAST_TOKENS, max=MOST_TOKENS, help="Length of the prompt, about.")] = 4096,
    max_tokens: Annotated[int, typer.Option(min=1, max=MOST_ANSWER, help="Length of the answers.")] = 32,
    settle: Annotated[float, typer.Option(min=0, max=3600, help="Seconds for the engine to write through.")] = 5,
    timeout: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds for each request.")] = 120,
    repeat: Annotated[int, typer.Option(min=1, max=100, help="Rounds, each with a prompt of its own.")] = 1,
    seed: Annotated[
        int | None, typer.Option(help="What the prompt is drawn from; one that was used before is not new to the store.")
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Send the first request only, and write it here.")] = None,
    after: Annotated[Path | None, typer.Option(metavar="FILE", help="Go on from such a file: the second request and the control.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Ask a running engine whether a prompt comes back from storage, and with the same text.

    A prompt that nobody has sent; the engine's own caches emptied, FOR ALL ITS
    USERS; the same prompt again; and one more that was never sent, whose time
    is what computing costs. The store keeps what it has.

        tiercache prove http://127.0.0.1:30000

    Over a restart of the server, which is the surer way:

        tiercache prove http://127.0.0.1:8000 --save proof.json

        tiercache prove http://127.0.0.1:8000 --after proof.json

    The server should report cached tokens: SGLang with --enable-cache-report,
    vLLM with --enable-prompt-tokens-details. vLLM empties its caches only with
    VLLM_SERVER_DEV_MODE=1. Exit codes: 0 a hit (or saved), 6 a miss, 4 another
    text, 7 it cannot be told.

    JSON fields: verdict (hit, miss, unknown, wrong), exit_code, sentence, url,
    engine, model, rounds (verdict, seed, restored_tokens, same_text,
    gain; first, again and control with text, first_token_s, prompt_tokens,
    cached_tokens, sources, null where not reported), notes, look_at. With jsonl
    a line for each of rounds, and a last line with summary, which has the rest.
    """
    if save is not None and after is not None:
        raise ConfigError("--save and --after are two runs, one before and one after the restart; give one of them")
    if repeat > 1 and (save is not None or after is not None):
        raise ConfigError("--repeat does not go with --save and --after, which are about one prompt; leave it out")
    if math.isnan(settle) or math.isnan(timeout):
        raise ConfigError("--settle and --timeout are seconds; give numbers")
    if save is not None:
        check_place(save)
    before = None if after is None else load(after)
    length = tokens if before is None else before.tokens
    server = Server(url, api_key, admin_key, timeout)
    try:
        with Console(stderr=True, emoji=False).status("asking who answers") as status:
            run = Run(server, find(server, engine, model), length, max_tokens if before is None else before.max_tokens, status.update)
            run.check_length()
            start = secrets.randbits(48) if seed is None else seed
            if save is not None:
                saved = run.save(start, save)
            else:
                report = run.after(before) if before is not None else run.rounds(range(start, start + repeat), settle)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
    if save is not None:
        _show_saved(run, saved, save, output)
        return
    if output is Output.TABLE:
        show(report)
    else:
        write(report, output)
    raise typer.Exit(EXITS[report.verdict])


def _show_saved(run: Run, saved: Saved, path: Path, output: Output) -> None:
    if output is not Output.TABLE:
        whole({"saved": str(path), **heading(saved.url, run.subject), "seed": saved.seed, "first": saved.first.record()}, output)
        return
    console().print(
        f"saved in {safe(str(path))}; let the engine write (some seconds), restart it, then: "
        f"tiercache prove {safe(saved.url)} --after {safe(str(path))}",
        soft_wrap=True,
    )

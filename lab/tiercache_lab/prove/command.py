"""The verb `tiercache prove`: its options, and the order of its steps."""

from __future__ import annotations

import math
import secrets
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tiercache.cli.terminal import Exit, Output, OutputOption, console, safe, whole
from tiercache.errors import ConfigError
from tiercache_lab.prove.engines import Engine, find
from tiercache_lab.prove.run import MAX_ANSWER, MAX_TOKENS, MIN_TOKENS, ProveRun, Saved, check_place, load
from tiercache_lab.prove.server import Server
from tiercache_lab.prove.verdict import EXITS, heading, show


def prove(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="URL of an SGLang or vLLM server itself, not of a router in front of servers."
        ),
    ],
    model: Annotated[
        str, typer.Option(help="Name of one of the server's models. Default: the first of them.")
    ] = "",
    engine: Annotated[
        Engine | None, typer.Option(help="Engine of the server. Default: the one that the server reports.")
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            envvar="OPENAI_API_KEY",
            metavar="KEY",
            show_default=False,
            help="The server's key; safer in the environment variable than in the option.",
        ),
    ] = "",
    admin_key: Annotated[
        str,
        typer.Option(
            envvar="SGLANG_ADMIN_API_KEY",
            metavar="KEY",
            show_default=False,
            help="SGLang's --admin-api-key, if the server has such a key.",
        ),
    ] = "",
    tokens: Annotated[
        int,
        typer.Option(
            min=MIN_TOKENS,
            max=MAX_TOKENS,
            help="Length of the prompt in tokens, about as the server counts them.",
        ),
    ] = 4096,
    max_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_ANSWER, help="Length of the answers in tokens.")
    ] = 32,
    settle: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds to wait until the engine has written the prompt.")
    ] = 5,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds after which a request is given up.")
    ] = 120,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the random prompt. If the seed was used before, the prompt may be stored already."
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Send only the first request, and save the result in this file."),
    ] = None,
    after: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Send the prompt in FILE (from --save) again, then another new prompt, and compare.",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check whether a running engine restores a prompt from storage, and answers with the same text.

    The command sends a new prompt, empties the engine's own caches FOR ALL ITS
    USERS, and sends the same prompt again. The store keeps its objects. Before,
    a short prompt shows how the server counts tokens; at the end, another new
    prompt shows how long computing takes without a cache.

        tiercache prove http://127.0.0.1:30000

    A test over a restart of the server is more reliable:

        tiercache prove http://127.0.0.1:8000 --save proof.json

        tiercache prove http://127.0.0.1:8000 --after proof.json

    The server should report cached tokens: SGLang with --enable-cache-report,
    vLLM with --enable-prompt-tokens-details. vLLM empties its caches only with
    VLLM_SERVER_DEV_MODE=1. Exit codes: 0 a hit (or saved), 6 a miss, 4 a
    different text, 7 unknown.

    JSON fields: verdict (hit, miss, unknown, wrong), exit_code, sentence, url,
    engine, model, seed, restored_tokens, same_text, gain; first, again and
    control with text, first_token_s, prompt_tokens, cached_tokens, sources (null
    where not reported); notes, look_at.
    """
    if save is not None and after is not None:
        raise ConfigError(
            "--save is for the run before the restart, --after for the run after it; give one of them"
        )
    if math.isnan(settle) or math.isnan(timeout):
        raise ConfigError("--settle and --timeout are seconds; give numbers")
    if save is not None:
        check_place(save)
    before = None if after is None else load(after)
    length = tokens if before is None else before.tokens
    server = Server(url, api_key, admin_key, timeout)
    try:
        with Console(stderr=True, emoji=False).status("asking the server for its engine") as status:
            run = ProveRun(
                server,
                find(server, engine, model),
                length,
                max_tokens if before is None else before.max_tokens,
                status.update,
            )
            run.check_length()
            start = secrets.randbits(48) if seed is None else seed
            if save is not None:
                saved = run.save(start, save)
            else:
                report = run.after(before) if before is not None else run.prove(start, settle)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None
    if save is not None:
        _show_saved(run, saved, save, output)
        return
    show(report, output)
    raise typer.Exit(EXITS[report.verdict])


def _show_saved(run: ProveRun, saved: Saved, path: Path, output: Output) -> None:
    if output is not Output.TABLE:
        record = {"saved": str(path), **heading(saved.url, run.subject), "seed": saved.seed}
        whole(record | {"first": saved.first.record()}, output)
        return
    console().print(
        f"saved in {safe(str(path))}; wait some seconds until the engine has written, restart it, then run: "
        f"tiercache prove {safe(saved.url)} --after {safe(str(path))}",
        soft_wrap=True,
    )

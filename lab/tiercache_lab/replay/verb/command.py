"""The `tiercache replay` command: from options to results."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiercache.cli.terminal import Exit, Output, OutputOption, line, records

if TYPE_CHECKING:
    from tiercache_lab.replay.results import Result


class WriteMode(enum.StrEnum):
    """When objects go from the host to storage (see `ControllerOptions.write`)."""

    THROUGH = "write_through"
    """When their request ends."""
    BACK = "write_back"
    """Ahead of their eviction from the host, if they are likely to be hit."""


def replay(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A trace file, a directory of recorded sessions, or a generator; the last two may have"
            " parameters: see --list.",
        ),
    ] = "",
    seed: Annotated[
        int, typer.Option(help="Seed of all random choices of a generator and of the index.")
    ] = 0,
    limit: Annotated[
        int | None, typer.Option(help="Number of requests to replay, counted from the first. Default: all.")
    ] = None,
    page: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens per page. Default: 64, or the block of a trace (512). Recorded sessions have the"
            " parameter page instead.",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="P,...",
            help="Policies, such as lru,seglen,lpc; see --list. all: the main ones, as far as they"
            " suit the model.",
        ),
    ] = "all",
    profile: Annotated[
        str,
        typer.Option(
            help="The model: a profile of --list, or the path of a config.json.", show_default=False
        ),
    ] = "",
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Find out how much host memory and disk save how much, with one policy (default: hvd).",
        ),
    ] = False,
    capacity: Annotated[
        str,
        typer.Option(
            metavar="F,...",
            help="Sizes of the cache, as fractions of the bytes that an infinite cache holds at the end,"
            " with the default checkpoints."
            " Default: 0.05,0.1,0.2.",
        ),
    ] = "",
    device_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Bytes of the device tier, such as 40GiB; not together with --capacity. Default: the device"
            " caches nothing and has room for the running requests.",
        ),
    ] = "",
    host_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Bytes of the host tier; not together with --capacity. Default: 0."
        ),
    ] = "",
    disk_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Bytes of one storage tier, short for --tier 'disk?capacity=SIZE'; not together with"
            " --capacity. Default: 0.",
        ),
    ] = "",
    tier: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME?capacity=SIZE&...",
            help="A storage tier below the host, the fastest first; repeat it for more. Other settings:"
            " bandwidth, and write, write_after, write_per_day, promote as in a chain of stores.",
        ),
    ] = None,
    checkpoints: Annotated[
        str,
        typer.Option(
            metavar="NAME|C,...",
            help="Where states are taken: a policy (rules, every:2048), or kinds of"
            " checkpoints; none: at no checkpoint.",
        ),
    ] = "branch,prompt,end,ghost",
    machine: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Let requests queue at a machine: its speeds, by a name of --list, or the path"
            " of a TOML file. Default: requests come one after the other.",
        ),
    ] = "",
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second at the machine, on average. Default: the source's times."),
    ] = None,
    open_loop: Annotated[
        bool,
        typer.Option(
            "--open/--closed",
            help="When the next request of a session comes: at the source's time, or its pause after the"
            " previous one has ended.",
        ),
    ] = False,
    slo_ttft: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Goodput counts requests whose first token comes within this time, as 2s."
        ),
    ] = "",
    slo_tpot: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Goodput counts requests with at most this time per further token, as 50ms."
        ),
    ] = "",
    write: Annotated[
        WriteMode,
        typer.Option(
            help="When objects go from the host to storage: at the end of their request, or ahead of their"
            " eviction from the host."
        ),
    ] = WriteMode.THROUGH,
    write_chance: Annotated[
        float,
        typer.Option(help="With write_back, the least chance of a hit with which an object is written."),
    ] = 0.02,
    bounds: Annotated[
        bool,
        typer.Option("--bounds/--no-bounds", help="Show also the rate of a cache that knows the future."),
    ] = True,
    output: OutputOption = Output.TABLE,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write charts and tables to this file, for a browser."),
    ] = None,
    listing: Annotated[
        bool,
        typer.Option(
            "--list",
            help="Print the generators with their parameters, policies, profiles and machines, and exit.",
        ),
    ] = False,
) -> None:
    """Replay traffic without a model, to see how much each policy saves at each capacity.

    The real index, policies and controller serve every request as if an engine
    had sent it, but no data is stored or copied. Times to the first token are
    calculated from the model's FLOPs and from bandwidths. For comparison, the
    results include bounds: the rate of a cache of unlimited size, and that of
    a cache that knows the future. The same seed gives the same figures.

    Compare all policies on a recorded trace, and write a report for a browser:

        tiercache replay trace.jsonl --report replay.html

    Compare two policies on recorded sessions of agents, 16 of them at once:

        tiercache replay 'traces/?live=16' --policy lru,hvd

    See what a second storage tier brings, and how much is written to it:

        tiercache replay trace.jsonl --policy hvd --host-bytes 100GiB
        --tier 'nvme?capacity=250GiB&bandwidth=6GB'
        --tier 'remote?capacity=1TiB&bandwidth=1GB&write=write_back'

    Compare the times to the first token of two policies, and how many requests
    per second keep within 2 s, if 4 requests per second queue at a GPU:

        tiercache replay multi-turn --policy hvd,lru --machine h100 --rate 4
        --slo-ttft 2s

    Ask how much memory is worth buying, as a sentence and a table:

        tiercache replay trace.jsonl --plan --report plan.html

    Repeat a published benchmark, with the tiers that it used:

        tiercache replay seed-20457
    """
    # These modules take long to import, and --help needs none of them.
    from tiercache.policy import DEFAULT_PROFILE, profile_named
    from tiercache_lab.replay.figures import counted
    from tiercache_lab.replay.machines import ReplayMachine, machine_named
    from tiercache_lab.replay.plan import STAGES, Search, facts
    from tiercache_lab.replay.study import Question, Study
    from tiercache_lab.replay.verb import asking, show

    if listing:
        if output is Output.TABLE:
            show.show_sources()
        else:
            records(show.source_records(), output)
        return
    if report is not None:
        asking.check_report(report)
    if plan:
        asking.check_plan(
            capacity=capacity, device_bytes=device_bytes, host_bytes=host_bytes, disk_bytes=disk_bytes,
            tier=tier, write=write is WriteMode.BACK,
        )  # fmt: skip
    model = profile_named(profile or DEFAULT_PROFILE)
    tiers = asking.tiers(device_bytes, host_bytes, disk_bytes, tier or [])
    asking.check_writes(write, write_chance, tiers)
    queueing = asking.queueing_of(
        machine, rate=rate, closed=not open_loop, slo_ttft=slo_ttft, slo_tpot=slo_tpot
    )
    question = Question(
        asking.source(source, seed, limit, closed=bool(queueing and queueing.closed), page=page),
        asking.policies(policy, model, plan=plan), model, asking.capacities(capacity), tiers,
        asking.checkpoints(checkpoints), machine_named(machine) if machine else ReplayMachine(),
        seed=seed, write=str(write), write_chance=write_chance, queueing=queueing, bounds=bounds,
    )  # fmt: skip
    if output is not Output.TABLE and question.source.about:
        typer.echo(question.source.about, err=True)
    found: list[Result] = []
    study: Search | Study | None = None
    code, stages = Exit.DONE, STAGES if plan else question.stages
    try:
        with show.watching(stages, len(question.source), as_json=output is not Output.TABLE) as watch:
            study = Search(question, watch) if plan else Study(question, watch)
            for result in study.results():
                found.append(result)
                if output is Output.JSONL:
                    line(show.record(result))
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
        typer.echo(f"interrupted after {counted(len(found), 'run')}", err=True)
    answer = study.plan if isinstance(study, Search) else None
    if output is Output.TABLE:
        show.show_results(found, question, answer)
    else:
        last = [{"plan": facts(answer)}] if answer else []
        records(last if output is Output.JSONL else [*map(show.record, found), *last], output)
    if found and report is not None:
        report.write_text(show.page_of(found, question, answer, is_whole=not code), "utf-8")
        typer.echo(f"report: {report}", err=True)
    raise typer.Exit(code)

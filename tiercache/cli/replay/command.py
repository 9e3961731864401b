"""The `tiercache replay` command: from options to results."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tiercache.cli.exits import Exit
from tiercache.cli.output import Output, OutputOption, line, records

if TYPE_CHECKING:
    from tiercache.replay.results import Result


class Refresh(enum.StrEnum):
    """Extent of what a hit makes young: the last node that it needs, or all of its path."""

    LAST = "last"
    PATH = "path"


def replay(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A trace file, or a generator with parameters: see below.")] = "",
    seed: Annotated[int, typer.Option(help="Of a generator, and of what an index draws at random.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Only so many requests, from the first.")] = None,
    policy: Annotated[
        str, typer.Option(metavar="P,...", help="Policies, such as lru,seglen:0.7,hvd; see below. all: those that the model has a use for.")
    ] = "all",
    profile: Annotated[str, typer.Option(help="The model: a known name or the path of a config.json.", show_default=False)] = "",
    capacity: Annotated[
        str, typer.Option(metavar="F,...", help="Sizes of the cache, as fractions of what an infinite one holds. Default: 0.05,0.1,0.2.")
    ] = "",
    device_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Instead of --capacity: bytes of the device, such as 40GiB.")] = "",
    host_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of the host. Without a device, that holds what runs.")] = "",
    disk_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of the disk below the host.")] = "",
    disk_policy: Annotated[str, typer.Option(help="What goes first from the disk, whatever --policy says of the tiers above.")] = "lru",
    device_states: Annotated[int | None, typer.Option(help="States of the device. Default: what a quarter of its bytes holds.")] = None,
    refresh: Annotated[
        Refresh, typer.Option(help="What a hit makes young: the last node that it needs, or all of its path.")
    ] = Refresh.LAST,
    checkpoints: Annotated[
        str, typer.Option(metavar="C,...", help="Where states are taken: branch, prompt, end, ghost; or none of these.")
    ] = "branch,prompt,end,ghost",
    every: Annotated[int, typer.Option(metavar="TOKENS", help="Take states at these intervals too; 0 does not.")] = 0,
    states_per_path: Annotated[int, typer.Option(help="The deepest states that one path may keep; 0 sets no limit.")] = 0,
    flops: Annotated[str, typer.Option(help="FLOPs per second that a prefill reaches, for the modelled times.")] = "250e12",
    host_bandwidth: Annotated[str, typer.Option(metavar="SIZE", help="Bytes per second from host to device.")] = "50GB",
    disk_bandwidth: Annotated[str, typer.Option(metavar="SIZE", help="Bytes per second from disk.")] = "6GB",
    bounds: Annotated[
        bool, typer.Option("--bounds/--no-bounds", help="What a cache that knows the future gets, and what none can.")
    ] = True,
    output: OutputOption = Output.TABLE,
    report: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write plots and tables as one file for a browser.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Print the generators with their parameters, and exit.")] = False,
) -> None:
    """Replay traffic without a model: which policy saves how much, at which capacity?

    Every request goes through the real index, policies and controller, as an
    engine would send it; only the bytes are missing. Times to the first token
    are modelled from the model's FLOPs and from bandwidths. Beside the policies
    stand bounds: a cache without a limit, one that knows the future, and what
    no cache of a size can exceed. The same seed gives the same figures.

    All policies on traffic of which there is a trace, and a page to look at:

        tiercache replay trace.jsonl --report replay.html

    Two policies on a generator, with tiers in bytes:

        tiercache replay 'agent?live=8' --policy lru,hvd --host-bytes 20GiB

    A published benchmark, with its own tiers:

        tiercache replay seed-20457
    """
    # Imported here to keep --help fast: it needs none of these modules.
    from tiercache.cli.replay import asking, rounds, table
    from tiercache.cli.replay import listing as sources
    from tiercache.cli.replay.lines import record
    from tiercache.cli.replay.watch import watching
    from tiercache.replay.report import write_report
    from tiercache.replay.report.words import counted
    from tiercache.replay.study import study

    if listing:
        if output is Output.TABLE:
            sources.show_sources()
        else:
            records(sources.source_records(), output)
        return
    if report is not None:
        asking.check_report(report)
    tiers = asking.tiers(device_bytes, host_bytes, disk_bytes, device_states, disk_policy)
    question = asking.question(
        asking.source(source, seed, limit), policy, profile, asking.capacities(capacity), tiers,
        asking.rules(checkpoints, every, states_per_path), asking.machine(flops, host_bandwidth, disk_bandwidth),
        refresh_path=refresh is Refresh.PATH, seed=seed, bounds=bounds,
    )  # fmt: skip
    found: list[Result] = []
    code = Exit.DONE
    try:
        with watching(question.stages, len(question.source), as_json=output is not Output.TABLE) as watch:
            for result in study(question, watch.stage):
                found.append(result)
                if output is Output.JSONL:
                    line(record(result))
                else:
                    watch.found(result)
    except KeyboardInterrupt:
        code = Exit.INTERRUPTED
        typer.echo(f"interrupted; {counted(len(found), 'result')} had been found", err=True)
    if output is Output.JSON:
        records(map(record, found), output)
    if found and output is Output.TABLE:
        table.show(found)
        rounds.show(found)
    if found and report is not None:
        write_report(found, report, notes=[*asking.notes(question), *(["It was interrupted: results are missing."] if code else [])])
        typer.echo(f"report: {report}", err=True)
    raise typer.Exit(code)

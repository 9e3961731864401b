"""The commands of `tiercache bench`, which turn options into a plan, run the plan and print the rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tiercache.cli.terminal import Output, OutputOption

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure this machine, and compare most figures with its speed without tiercache.",
)

Sizes = Annotated[str, typer.Option(help="Sizes of an object, multiples of 4KiB, separated by commas.")]
Directory = Annotated[
    Path,
    typer.Option(
        "--directory", "-d", help="Directory on the disk to measure; written files are removed at the end."
    ),
]
Repeat = Annotated[
    int,
    typer.Option(min=1, max=1000, help="Number of runs for each median, after one run that is not counted."),
]


@bench.command()
def disk(
    backend: Annotated[str, typer.Option(help="Store to measure: file or lmdb.")] = "file",
    size: Sizes = "16KiB,256KiB,1MiB,16MiB",
    directory: Directory = Path(),
    repeat: Repeat = 5,
    total: Annotated[
        str,
        typer.Option(
            "--bytes",
            help="Maximum bytes that all runs of one size store together. A low value makes batches smaller.",
        ),
    ] = "2GiB",
    case: Annotated[
        str,
        typer.Option(
            help=(
                "Measure only these cases, separated by commas: set-cached, set-fresh, get-warm, get-cold,"
                " exists, open."
            )
        ),
    ] = "",
    objects: Annotated[
        int,
        typer.Option(
            min=0, help="If not 0: also measure exists and open on a store with this number of tiny objects."
        ),
    ] = 0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure a store on disk, and compare it with raw system calls.

    A batch has 128 objects, or fewer if they would exceed 256 MiB. The store and the system calls take turns
    and use the same buffers, and all bytes read are compared. The time of a set includes computing the
    checksums. The time of a get includes verifying them.

    Measure a disk with pages of 1 MiB:

        tiercache bench disk --directory /var/lib --size 1MiB

    Measure the start of a store with a million objects:

        tiercache bench disk --size 4KiB --case open --objects 1000000
    """
    # These modules take long to import, and --help needs none of them.
    from tempfile import TemporaryDirectory

    from tiercache_lab.bench.baselines import direct_possible
    from tiercache_lab.bench.disk import footer, run
    from tiercache_lab.bench.machine import machine
    from tiercache_lab.bench.plan import plan
    from tiercache_lab.bench.rows import collect, show

    made = plan(
        backend=backend, sizes=size, path=directory, repeats=repeat, total=total, cases=case, objects=objects
    )  # fmt: skip
    with TemporaryDirectory(prefix=".benchmark-", dir=made.directory) as temporary:
        root = Path(temporary)
        here = machine(root, direct=direct_possible(root))
        # If the reader of stdout closes it, the run stops between two rows. closing() then closes the store.
        with _progress(output) as say, closing(run(made, root, here, say)) as found:
            rows = collect(found, output)
    show(rows, footer(made, here), output)


@bench.command()
def rpc(
    size: Sizes = "16KiB,1MiB,16MiB",
    directory: Directory = Path(),
    repeat: Repeat = 5,
    batch: Annotated[
        str, typer.Option(help="Maximum bytes of a batch, which has at most 128 objects.")
    ] = "128MiB",
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure a daemon on this machine, over TCP and through shared memory.

    TCP is compared with plain sockets that move the same bytes. Shared memory is compared with the same file
    store in this process. The command starts a daemon of its own. The daemon, the sockets and the store take
    turns and use the same buffers. A get includes verifying the checksums.

        tiercache bench rpc --directory /var/lib --size 1MiB
    """
    from tempfile import TemporaryDirectory

    from tiercache.config import parse_size
    from tiercache_lab.bench import rpc as cases
    from tiercache_lab.bench.baselines import direct_possible
    from tiercache_lab.bench.machine import machine
    from tiercache_lab.bench.plan import directory_of, sizes_of
    from tiercache_lab.bench.rows import collect, show

    sizes, batch_bytes = sizes_of(size), parse_size(batch)
    with TemporaryDirectory(prefix=".benchmark-", dir=directory_of(directory)) as temporary:
        root = Path(temporary)
        here = machine(root, direct=direct_possible(root))
        with _progress(output) as say, closing(cases.run(root, sizes, batch_bytes, repeat, say)) as found:
            rows = collect(found, output)
    about = f"{here}. Medians of {repeat} interleaved runs over the same buffers."
    show(rows, [about, cases.FOOTER], output)


@bench.command()
def device(
    number: Annotated[
        int, typer.Option("--device", min=0, max=127, help="Number of the CUDA device in this process.")
    ] = 0,
    most: Annotated[
        str,
        typer.Option(
            help="Maximum bytes of a group of objects. The command page-locks host memory of twice this size."
        ),
    ] = "1GiB",
    repeat: Annotated[
        int,
        typer.Option(
            min=5, max=1000, help="Number of runs for each median, after one run that is not counted."
        ),
    ] = 5,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure copies between a CUDA device and page-locked host memory.

    The command measures stores and loads of 1 to 256 objects of Qwen3-Next (pages
    of 64 tokens, and states) through the transfer engine. Each is compared with one
    contiguous copy of the same number of bytes. It is measured with each method
    alone, and with those that the engine chooses. The methods are batch (the
    driver's batched copies), memcpy (one call per copy) and kernel (tiercache's
    kernel). A method that does not copy every byte in a trial is left out and named.

        tiercache bench device -o json
    """
    from tiercache.transfer import cuda
    from tiercache_lab.bench.device import device_plan, footer, run
    from tiercache_lab.bench.rows import collect, show

    made = device_plan(most, repeat)
    card = cuda.CupyDevice(number)
    with _progress(output) as say, closing(run(made, card, say)) as found:
        rows = collect(found, output)
    show(rows, footer(made, card), output)


@contextmanager
def _progress(output: Output) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step on a line of stderr.

    The function shows nothing if stderr is not a terminal. It also shows nothing if rows are printed one by
    one on a terminal, because the line would appear between the rows.
    """
    console = Console(stderr=True, emoji=False)
    if (output is Output.JSONL and sys.stdout.isatty()) or not console.is_terminal:
        yield lambda _: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # By default rich redirects stdout to this console, so that the rows would go to stderr.
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, refresh_per_second=2
    ) as progress:
        task = progress.add_task("starting")
        yield lambda doing: progress.update(task, description=doing)

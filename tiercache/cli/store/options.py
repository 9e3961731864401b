"""Options that the operator's verbs share, as annotated types for typer."""

from __future__ import annotations

from typing import Annotated

import typer

StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        "-s",
        envvar="TIERCACHE_STORE",
        metavar="TARGET",
        help="The directory of a stopped store or of a daemon, or a URL: grpc://host:port, grpc:///directory/of/sockets, file:///directory."
        " Default: /var/lib/tiercache.",
    ),
]
MacKeyOption = Annotated[str, typer.Option("--mac-key", metavar="FILE", help="The key of a stopped store that was made with one.")]
NamespaceOption = Annotated[str, typer.Option(help="The first digits of a namespace's id, or a part of its label.")]
PoolOption = Annotated[str, typer.Option(help="Objects of this pool: kv, mamba, swa or indexer.")]
DepthOption = Annotated[str, typer.Option(metavar="A..B", help="Objects that end at these depths, in pages: 3..17, 3.., ..17 or 3.")]
MinSizeOption = Annotated[str, typer.Option(metavar="SIZE", help="Objects of at least this size, such as 1MiB.")]
MaxSizeOption = Annotated[str, typer.Option(metavar="SIZE", help="Objects of at most this size.")]
OlderOption = Annotated[str, typer.Option(metavar="TIME", help="Objects stored longer ago than this, such as 1h or 7d.")]
NewerOption = Annotated[str, typer.Option(metavar="TIME", help="Objects stored no longer ago than this, such as 10min.")]

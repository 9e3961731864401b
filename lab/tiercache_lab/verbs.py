"""Verbs of the lab, which entry points add to the `tiercache` command."""

from __future__ import annotations

from typing import Final

from tiercache.cli.verbs import Verb

DEMO: Final = Verb(
    "tiercache_lab.demo.command:demo",
    "Serve conversations, kill the process, continue them in a second process, and check every answer.",
)
REPLAY: Final = Verb(
    "tiercache_lab.replay.verb.command:replay",
    "Replay traffic without a model, to see how much each policy saves at each capacity.",
)
PROVE: Final = Verb(
    "tiercache_lab.prove.command:prove",
    "Check whether a running engine restores a prompt from storage, and answers with the same text.",
)
BENCH: Final = Verb(
    "tiercache_lab.bench.command:bench",
    "Measure this machine, and compare most figures with its speed without tiercache.",
)

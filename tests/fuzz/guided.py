"""Fuzzing of one target guided by coverage, in a process of its own, with atheris (libFuzzer).

    python -m tests.fuzz.guided "ticket" --seconds 120 [--corpus DIR]

Ends with status 0 if nothing was found. Otherwise the error is shown, and the input that led to it is in a
file whose name begins with `crash-`, `timeout-` or `oom-`. A later run tries the inputs in --corpus again.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import resource
import sys
from pathlib import Path

INSTRUMENTED = ["tiercache", "tiercache_backends", "tiercache_lab", "numpy.lib._format_impl", "tomllib"]
"""Packages and modules whose branches guide the search; what is compiled cannot be seen."""
SPARE_BYTES = 512 << 20
"""Memory that the process may take beyond what it has before the first input."""


def main(arguments: list[str]) -> int:
    """Fuzz until the time is over or something is found; libFuzzer ends the process itself."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided")
    parser.add_argument("target")
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--corpus", type=Path, default=Path(".fuzz"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)

    import atheris

    logging.disable(logging.CRITICAL)  # decoders warn of what they refuse
    with atheris.instrument_imports(include=INSTRUMENTED):
        from tests.fuzz.table import TARGETS
    target = TARGETS[options.target]
    corpus = options.corpus / target.name.replace(" ", "_").replace("'", "")
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        target.attempt(seed)  # what is imported or made on first use is there before memory is limited
        (corpus / f"seed-{number}").write_bytes(seed)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + max(SPARE_BYTES, 2 * target.max_memory), hard))
    faulthandler.enable()

    def one_input(data: bytes) -> None:
        target.attempt(data)

    atheris.Setup(
        [
            sys.argv[0], str(corpus), f"-max_total_time={options.seconds}", f"-seed={options.seed}",
            f"-max_len={target.max_bytes}", f"-timeout={max(10, int(target.seconds))}",
            f"-artifact_prefix={corpus.parent}/", "-rss_limit_mb=4096", "-print_final_stats=1",
        ],
        one_input,
    )  # fmt: skip
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

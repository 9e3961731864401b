"""Repeat simulated lives by their seeds: `python -m tests.simulation [--ranks] SEED [SEED...]`."""

import logging
import os
import sys

from tests.simulation.lives import live
from tests.simulation.ranks import live_in_ranks

if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set of strings would differ between runs
        again = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(sys.executable, again, os.environ | {"PYTHONHASHSEED": "0"})
    logging.disable(logging.CRITICAL)  # every fault that is made here is warned of
    if sys.argv[1:2] == ["--ranks"]:
        for seed in sys.argv[2:]:
            print(seed, live_in_ranks(int(seed)))
        sys.exit()
    for seed in sys.argv[1:]:
        print(seed, flush=True)
        life = live(int(seed))
        print(life.world.digest, f"{life.world.now:.1f} s", life.plan, life.counts, sep="\n  ")

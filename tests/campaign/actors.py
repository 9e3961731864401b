"""Processes that open a damaged store, work in it or look at it, and may kill themselves at any call to the
outside world.

`python -m tests.campaign.actors` is a nursery like that of `writer`; its processes each play a `Part`. They
say "calls N" at their end (how many calls the `Env` saw), and what their job has to tell.
"""

from __future__ import annotations

from tests.campaign import forks, gone, jobs, rot  # noqa: F401 (they make the jobs known)
from tests.campaign.parts import act

if __name__ == "__main__":
    act()

"""What no cache of a size can exceed on a source, whatever it knows of the future and wherever it takes its states.

The model: requests one after another. What is left of a request's pages and states afterwards competes for the cache's bytes in the gaps
between requests; what a running request works on is free. A request that hits d pages needs each of them, and a state at d, in every gap
since they were last computed: since the last request with that prefix. Hits of several requests never share bytes in a gap, for the next
request with a prefix computes it anyway, hit or not.

So the best hits are those that gain most among the choices of one depth per request that fit into every gap. The bound is this problem's
Lagrangian dual: bytes have a price in each gap, each request takes the depth with the highest profit, and

    any cache's gain <= capacity x sum of prices + sum of profits

whatever the prices, because a cache's hits are worth no more than their profit and the bytes that they paid for. Prices are therefore only
searched for, never trusted: the least sum found is the bound. With one price for all gaps it would be PFOO-L (Berger, Beckmann and
Harchol-Balter, "Practical Bounds on Optimal Caching with Variable Object Sizes", 2018), the fractional knapsack over all use intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from tiercache.core import reusable_pages
from tiercache.index.prefixes import Prefixes
from tiercache.policy import ModelProfile
from tiercache.replay.base import Request, Source

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

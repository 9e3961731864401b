"""Exact placement of checkpoints on one path, if it is known how often prompts leave the path at each depth.

A *point* is a depth at which prompts leave the path or at which a state can be taken. Points are numbered
from 0 in ascending depth. A prompt that leaves at a point restores the deepest state at or before the point,
and computes the rest of the way. Without any state, it computes from depth 0.

The work of point x from a state at point i is flops[x] - flops[i]. For a state at i, the work of all points
before j is linear in the total weight before j, with the slope -flops[i]. The best last state before each j
is therefore on the lower envelope of lines that come in the order of their slopes and are asked in ascending
order: each line is added once and dropped at most once (the convex-hull trick). One layer of the dynamic
program takes time linear in the number of points, so that at most M states among N points are placed in
O(NM), as in *Sparse Prefix Caching for Hybrid and Recurrent LLM Serving* (arXiv 2605.05219).
"""

from __future__ import annotations

from collections.abc import Sequence

Numbers = Sequence[float]


class Placement:
    """Best places of at most `most` states, for every number of leading points.

    `weights` says how often prompts leave at each point, and `flops` the work of computing from depth 0 to
    each point, ascending. Takes O(len(weights) x most) time and memory. Plain immutable data.
    """

    def __init__(self, weights: Numbers, flops: Numbers, most: int) -> None:
        without = _without_states(weights, flops)
        self._layers = [(without, [-1] * len(without))]
        for _ in range(most):
            self._layers.append(_layer(weights, flops, self._layers[-1][0]))

    def best(self, points: int) -> list[int]:
        """Return the points of the states that serve the first `points` points best, ascending."""
        found: list[int] = []
        for _, chosen in reversed(self._layers[1:]):
            # A layer's answer is the same as that of the layer before if one more state does not help.
            if (point := chosen[points]) >= 0:
                found.append(point)
                points = point
        return found[::-1]


def place_priced(weights: Numbers, flops: Numbers, prices: Numbers) -> list[int]:
    """Return the points, ascending, at which states save more work than they cost: any number of them.

    `prices[i]` is the cost of a state at point i, in FLOPs. The sum of the remaining work and of the prices
    is as low as possible. Takes O(len(weights)) time.
    """
    _, chosen = _layer(weights, flops, None, prices)
    found: list[int] = []
    point = chosen[-1]
    while point >= 0:
        found.append(point)
        point = chosen[point]
    return found[::-1]


def _without_states(weights: Numbers, flops: Numbers) -> list[float]:
    total, totals = 0.0, [0.0]
    for weight, work in zip(weights, flops, strict=True):
        total += weight * work
        totals.append(total)
    return totals


def _layer(
    weights: Numbers, flops: Numbers, before: Numbers | None, prices: Numbers | None = None
) -> tuple[list[float], list[int]]:
    """Return, for each number of leading points, the least work and the point of the last state (-1: none).

    `before[i]` is the least work of the first i points with one state less. None stands for the result
    itself, so that any number of states is allowed.
    """
    # With W and S as the running totals of the weights and of weights x flops before a point, the work of the
    # points [i, j) from a state at point i is
    #   S[j] - S[i] - flops[i] x (W[j] - W[i])
    # which is S[j] plus a line in W[j] with the slope -flops[i].
    best: list[float] = []
    chosen: list[int] = []
    # Lines of the envelope from `first` on, as parallel lists: plain lists are several times faster here than
    # objects. The first line stands for no state.
    slopes, starts, points, first = [0.0], [0.0], [-1], 0
    weight = total = 0.0
    for i in range(len(weights) + 1):
        value = starts[first] + slopes[first] * weight
        while first + 1 < len(slopes) and (later := starts[first + 1] + slopes[first + 1] * weight) < value:
            first, value = first + 1, later
        best.append(total + value)
        chosen.append(points[first])
        if i == len(weights):
            break
        work = flops[i]
        slope, start = -work, (best if before is None else before)[i] - total + work * weight
        if prices:
            start += prices[i]
        weight += weights[i]
        total += weights[i] * work
        if slopes[-1] == slope:
            if starts[-1] <= start:
                continue
            if len(slopes) > first + 1:
                del slopes[-1], starts[-1], points[-1]
            else:
                starts[-1], points[-1] = start, i
                continue
        # The last line is nowhere the lowest if the new one crosses the line before it earlier.
        while len(slopes) > first + 1 and (start - starts[-2]) * (slopes[-2] - slopes[-1]) <= (
            starts[-1] - starts[-2]
        ) * (slopes[-2] - slope):
            del slopes[-1], starts[-1], points[-1]
        slopes.append(slope)
        starts.append(start)
        points.append(i)
    return best, chosen

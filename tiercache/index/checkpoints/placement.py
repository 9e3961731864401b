"""Exact placement of checkpoints on one path, if it is known how often prompts leave the path at each depth.

A *point* is a depth at which prompts leave the path or at which a state can be taken. Points are numbered
from 0 in ascending depth. A prompt that leaves at a point restores the deepest state at or before the point,
and computes the rest of the way. Without any state, it computes from depth 0.

The work of point x from a state at point i is flops[x] - flops[i]. For a state at i, the work of all points
before j is linear in the total weight before j, with the slope -flops[i]. The best last state before each j
is therefore on the lower envelope of lines that come in the order of their slopes and are asked in ascending
order: each line is added once and dropped at most once (the convex-hull trick). The program takes time linear
in the number of points. *Sparse Prefix Caching for Hybrid and Recurrent LLM Serving* (arXiv 2605.05219) has
such a program with a fixed number of states instead of a price for each.
"""

from __future__ import annotations

from collections.abc import Sequence

Numbers = Sequence[float]


def place_priced(weights: Numbers, flops: Numbers, prices: Numbers) -> list[int]:
    """Return the points, ascending, at which states save more work than they cost: any number of them.

    `weights` says how often prompts leave at each point, `flops` is the work of computing from depth 0 to
    each point, ascending, and `prices[i]` the cost of a state at point i, in FLOPs. The sum of the remaining
    work and of the prices is as low as possible. Takes O(len(weights)) time.
    """
    # With W and S as the running totals of the weights and of weights x flops before a point, the work of the
    # points [i, j) from a state at point i is
    #   S[j] - S[i] - flops[i] x (W[j] - W[i])
    # which is S[j] plus a line in W[j] with the slope -flops[i].
    best: list[float] = []  # least cost of the first i points, and the point of the last state (-1: none)
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
        slope, start = -work, best[i] - total + work * weight + prices[i]
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
    found: list[int] = []
    point = chosen[-1]
    while point >= 0:
        found.append(point)
        point = chosen[point]
    return found[::-1]

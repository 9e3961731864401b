"""Curve of what a cache saves by its size, its knee, and the size that would tell most next."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_STRAIGHT: Final = 0.05
"""Least distance of a knee from the chord, on axes of length 1; below it, the curve counts as straight."""
_RISE: Final = 0.06
"""Rise between two neighbouring sizes, as a share of the top, that is worth another run between them."""
_NARROW: Final = 1.35
"""Ratio of two neighbouring sizes below which no size between them is worth a run."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Saved fraction of the prefill by size in bytes.

    `measured` has at least one size, and its largest is that of a cache without a limit. A size may save less
    than a smaller one; then the smaller one's figure counts for it, because a cache need not use all its
    bytes.
    """

    measured: Mapping[int, float]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Measured sizes, ascending."""
        return tuple(sorted(self.measured))

    @property
    def largest(self) -> int:
        """Size of the cache without a limit."""
        return max(self.measured)

    @property
    def top(self) -> float:
        """Highest saved fraction."""
        return max(self.measured.values())

    def at(self, size: float) -> float:
        """Return the saved fraction at any size.

        Between two measured sizes it rises with the logarithm of the size, and below the smallest one in
        proportion to the size.
        """
        sizes, values = self.sizes, self._rising()
        place = bisect_left(sizes, size)
        if place == len(sizes):
            return values[-1]
        if place == 0:
            return values[0] * size / sizes[0]
        share = math.log(size / sizes[place - 1]) / math.log(sizes[place] / sizes[place - 1])
        return values[place - 1] + share * (values[place] - values[place - 1])

    def knee(self) -> int | None:
        """Return the measured size that lies farthest above the straight line from nothing to the largest.

        Both axes are scaled to length 1. This is the knee of Satopaa and others, "Finding a 'Kneedle' in a
        Haystack" (2011), for a concave curve without smoothing. None if nothing is saved, or if the curve is
        nearly straight, so that no size is better than another.
        """
        if self.top <= 0:
            return None
        distances = [
            (value / self.top - size / self.largest, -size)
            for size, value in zip(self.sizes, self._rising(), strict=True)
        ]
        distance, size = max(distances)
        return -size if distance >= _STRAIGHT else None

    def enough(self, share: float) -> int:
        """Return the smallest measured size that saves at least `share` of what the best size saves."""
        # The tolerance is for the rounding of the product: with a share of 1, the top itself must suffice.
        wanted = share * self.top - 1e-12
        return next(size for size, value in zip(self.sizes, self._rising(), strict=True) if value >= wanted)

    def doubling(self, size: float) -> float:
        """Return what twice this size saves more, as a fraction of the prefill."""
        return self.at(2 * size) - self.at(size)

    def next_size(self, smallest: int) -> int | None:
        """Return the size whose run would tell most; None if the curve is known well enough.

        The curve is measured from large to small until a size saves little or is below `smallest`. Then the
        steepest gap between two neighbours is halved, on a logarithmic scale, until every gap is flat or
        narrow.
        """
        sizes, values, worth = self.sizes, self._rising(), _RISE * self.top
        if self.top <= 0:
            return None
        if values[0] > worth and sizes[0] // 4 >= smallest:
            return sizes[0] // 4
        gaps = [
            (values[i + 1] - values[i], math.isqrt(sizes[i] * sizes[i + 1]))
            for i in range(len(sizes) - 1)
            if sizes[i + 1] > _NARROW * sizes[i]
        ]
        rise, size = max(gaps, default=(0.0, 0))
        return size if rise > worth else None

    def _rising(self) -> list[float]:
        """Return, for each measured size, the highest saved fraction of this and all smaller sizes."""
        found, highest = [], -math.inf
        for size in self.sizes:
            highest = max(highest, self.measured[size])
            found.append(highest)
        return found

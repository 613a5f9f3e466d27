"""Make a long series short without hiding what stands out of it.

The series is cut into equal stretches of x, and of each stretch the lowest and the highest point
stay: a spike of one step is still there, and nothing is averaged.
"""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float]


def keep_extremes(points: Sequence[Point], num_buckets: int) -> list[Point]:
    """Return at most `2 * num_buckets + 2` of the points, in order, or all if they are so few.

    Args:
        points: ascending by x.
        num_buckets: stretches of x, at least 1; of each the lowest and the highest point stay,
            and of the whole the first and the last.
    """
    if len(points) <= 2 * num_buckets + 2:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width = (last - first) / num_buckets or 1.0
    kept = {0, len(points) - 1}
    bucket: list[int] = []
    current = 0
    for index, (x, _) in enumerate(points):
        place = min(int((x - first) / width), num_buckets - 1)
        if place != current:
            kept |= _extremes(points, bucket)
            bucket, current = [], place
        bucket.append(index)
    kept |= _extremes(points, bucket)
    return [points[index] for index in sorted(kept)]


def _extremes(points: Sequence[Point], indices: Sequence[int]) -> set[int]:
    if not indices:
        return set()
    return {
        min(indices, key=lambda index: points[index][1]),
        max(indices, key=lambda index: points[index][1]),
    }

"""Which shards of a stage have been computed: one record in the stage's work directory.

It outlives attempts and runs. Changed only by who holds its lock, so exactly one process learns
that the last shard is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redco_flow.records import read_json_if_present, write_json

LOCK = "shards.lock"
_RECORD = "shards.json"


def shards_left(work_dir: Path, num_shards: int) -> tuple[int, ...]:
    """Return the shards that are to be computed; all of them, where the parts were not joined."""
    computed = _read(work_dir).get(str(num_shards), [])
    every = range(num_shards)
    return tuple(shard for shard in every if shard not in computed) or tuple(every)


def note_computed(work_dir: Path, shard: int, num_shards: int) -> bool:
    """Write down that a shard is computed; return whether all are. Call it with the lock held."""
    record = _read(work_dir)
    computed = sorted({*record.get(str(num_shards), []), shard})
    write_json(work_dir / _RECORD, record | {str(num_shards): computed})
    return len(computed) == num_shards


def _read(work_dir: Path) -> dict[str, Any]:
    """Shards that are computed, by the number of shards."""
    return dict(read_json_if_present(work_dir / _RECORD) or {})

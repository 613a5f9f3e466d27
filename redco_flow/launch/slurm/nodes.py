"""Slurm's notation of nodes, `gpu[01-04,07]`, and ranks over nodes of several fabrics."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

_NODES = r"(?:[^,\[\]\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
_WORD = re.compile(_NODES)
_LIST = re.compile(rf"{_NODES}(?:,{_NODES})*")
_BRACKETS = re.compile(r"\[([^\]]*)\]")


def expand_nodes(text: str) -> list[str]:
    """Return the names of nodes.

    Raises:
        ValueError: this is not Slurm's notation.
    """
    if not _LIST.fullmatch(text):
        raise ValueError(f"{text!r} is not a list of nodes as Slurm writes it, as gpu[01-04],big1")
    found: list[str] = []
    for word in _WORD.findall(text):
        pieces = _BRACKETS.split(word)  # a text and the numbers behind it, in turns
        texts = [[*_numbers(one)] if place % 2 else [one] for place, one in enumerate(pieces)]
        found += map("".join, itertools.product(*texts))
    return found


def rank_by_fabric(environ: Mapping[str, str], fabrics: Sequence[str], local_rank: int) -> int:
    """Return the rank of a task of srun's, where nodes of one fabric have ranks in a row.

    Args:
        fabrics: the nodes of each; those of none come last.
    """
    nodes = expand_nodes(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
    place = {node: number for number, text in enumerate(fabrics) for node in expand_nodes(text)}
    ordered = sorted(nodes, key=lambda node: place.get(node, len(fabrics)))
    own = nodes[int(environ["SLURM_NODEID"])]
    processes_per_host = int(environ["SLURM_NTASKS"]) // len(nodes)
    return ordered.index(own) * processes_per_host + local_rank


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"

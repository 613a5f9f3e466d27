"""Slurm's notation of nodes, `gpu[01-04,07]`, and ranks over nodes of several fabrics."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

_NODES = r"(?:[^,\[\]\s]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
_WORD = re.compile(rf"{_NODES}")
_LIST = re.compile(rf"{_NODES}(?:,{_NODES})*")
_BRACKETS = re.compile(r"\[([^\]]*)\]")


def expand_nodes(text: str) -> list[str]:
    """Return the names of nodes.

    Raises:
        ValueError: this is not Slurm's notation, or a range ends before it begins.
    """
    if not _LIST.fullmatch(text):
        raise ValueError(f"{text!r} is not a list of nodes as Slurm writes it, as gpu[01-04],big1")
    found: list[str] = []
    for word in _WORD.findall(text):
        pieces = _BRACKETS.split(word)  # a text and the numbers behind it, in turns
        texts = [[*_numbers(one)] if place % 2 else [one] for place, one in enumerate(pieces)]
        found += map("".join, itertools.product(*texts))
    return found


def rank_by_fabric(environ: Mapping[str, str], fabrics: Sequence[str]) -> int:
    """Return the rank of a task of srun's, where nodes of one fabric have ranks in a row.

    Args:
        fabrics: the nodes of each; those of none come last.
    """
    nodes = _nodes_of_step(environ)
    tasks = dict(zip(nodes, _tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"]), strict=True))
    place = {node: number for number, text in enumerate(fabrics) for node in expand_nodes(text)}
    ordered = sorted(nodes, key=lambda node: place.get(node, len(fabrics)))
    before = ordered[: ordered.index(nodes[int(environ["SLURM_NODEID"])])]
    return sum(tasks[node] for node in before) + int(environ["SLURM_LOCALID"])


def nodes_of_no_fabric(environ: Mapping[str, str], fabrics: Sequence[str]) -> list[str]:
    """Return the step's nodes that no fabric names, perhaps for they are written differently."""
    known = {node for text in fabrics for node in expand_nodes(text)}
    return [node for node in _nodes_of_step(environ) if node not in known]


def _nodes_of_step(environ: Mapping[str, str]) -> list[str]:
    return expand_nodes(environ["SLURM_STEP_NODELIST"])


def _tasks_per_node(text: str) -> Iterator[int]:
    """Read Slurm's `2(x3),1`."""
    for part in text.split(","):
        number, _, times = part.rstrip(")").partition("(x")
        yield from itertools.repeat(int(number), int(times or 1))


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        if last and int(last) < int(first):
            raise ValueError(f"the range {part} of nodes ends before it begins")
        for number in range(int(first), int(last or first) + 1):
            yield f"{number:0{len(first)}}"

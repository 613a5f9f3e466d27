"""Choose which splits of a dataset are trained and evaluated on, by `data.splits`."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from redco_flow.spec.pipeline import DataSection
from redco_flow.spec.raw_data import LEFT_OUT, split_names

SPLITS = ("train", "validation", "test")
_Of = TypeVar("_Of")


def chosen(data: DataSection, named: list[tuple[str, _Of]]) -> list[tuple[str, _Of]]:
    """Keep what `data.splits` chooses, under the pipeline's names of the splits.

    Raises:
        ValueError: it names a split that the data do not have.
    """
    if not data.splits:
        return named
    there = {split for split, _ in named}
    choice = split_choice(data, there)
    return [
        (split, one)
        for split, theirs in choice.items()
        for its_split, one in named
        if its_split == theirs
    ]


def split_choice(data: DataSection, there: Collection[str]) -> dict[str, str]:
    """Return the data's name of each split that is read.

    Args:
        there: the splits that the data have.

    Raises:
        ValueError: there is no split to train on, or none of a name that the pipeline gives.
    """
    listed = ", ".join(sorted(there))
    for split, name in data.splits.items():
        if name != LEFT_OUT and name not in there:
            raise ValueError(
                f"{data.dataset}: 'data.splits.{split}': there is no split '{name}'; its splits "
                f"are {listed}."
            )
    return {split: name for split, name in split_names(data.splits).items() if name in there}


def unread_splits(data: DataSection, there: Collection[str]) -> str | None:
    """Say which splits of a dataset are not read, and the key to change it; None where all are."""
    left_out = sorted(set(there) - set(split_choice(data, there).values()))
    if not left_out:
        return None
    are = "is" if len(left_out) == 1 else "are"
    said = f"dataset {data.dataset}: {', '.join(left_out)} {are} not read"
    if data.splits:
        return f"{said} (data.splits)"
    return (
        f"{said}; data.splits: {{validation: {left_out[0]}}} chooses which split is which, and "
        "`none` leaves one out"
    )

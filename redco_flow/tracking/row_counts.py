"""Notes on the rows of a dataset, from the counts of its splits: unusable, cut, and not learnt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_BAD_ROWS = (
    "fix them; data.on_bad_row: error stops at the first such row, {skip: 1 %} allows a limited "
    "number"
)
_CURATED = "found by the stage of kind curate"
_CONVERSATIONS = "raise max_length, or drop longer ones by on_too_long: drop"
_DROPPED = "raise max_length, or keep their beginning by on_too_long: truncate"


def learnt_notes(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield what is to be known of a split of conversations, the share that is learnt first.

    Args:
        counts: of `DatasetSummary.splits`.
    """
    share = counts["learnt_tokens"] / max(1, counts["target_tokens"])
    yield (
        f"{counts['rows']:,} conversations, {counts['target_tokens']:,} tokens, of which "
        f"{share:.1%} are learnt"
    )
    if counts["cut_targets"]:
        yield f"{counts['cut_targets']:,} are cut at max_length"
    if counts["dropped_rows"]:
        yield f"{counts['dropped_rows']:,} are dropped: longer than max_length"
    if counts.get("parsed_arguments"):
        yield (
            f"{counts['parsed_arguments']:,} have tool calls whose arguments were JSON in a text: "
            "the template gets them as mappings"
        )
    yield from learnt_warnings(counts)


def learnt_warnings(counts: Mapping[str, int]) -> Iterator[str]:
    """Yield what is likely to be a mistake."""
    if counts["double_starts"]:
        yield (
            f"{counts['double_starts']:,} begin with the start token (BOS) twice: once by the "
            "template, once by their own text"
        )
    if counts["missing_ends"]:
        yield (
            f"{counts['missing_ends']:,} have an answer without the tokenizer's end token (EOS): "
            "the template ends turns with another token than the tokenizer's eos_token. A model "
            "that learns it does not stop, unless its config.json or generation_config.json, or "
            "model.config.eos_token_id, has that token among its end tokens"
        )


@dataclass(frozen=True)
class RowGroup:
    """Rows that are not in a dataset, or not in full.

    Args:
        what: skipped, truncated or dropped.
        reason: why, or what was truncated.
        remedy: what to do about it.
    """

    what: str
    reason: str
    num_rows: int
    remedy: str


@dataclass(frozen=True)
class RowLosses:
    """Counts of the rows that preprocessing read, by outcome.

    Args:
        num_read: of all splits; None of a dataset of an earlier version.
        groups: of rows that are not in the dataset, or not in full.
    """

    num_read: int | None
    groups: tuple[RowGroup, ...]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> RowLosses:
        """Read them from the metadata of a dataset artifact."""
        curated = metadata.get("curated_rows") or {}
        skipped = sorted(
            (metadata.get("skipped_rows") or {}).items(), key=lambda item: (-item[1], item[0])
        )
        groups = [
            RowGroup("skipped", reason, count, _CURATED if reason in curated else _BAD_ROWS)
            for reason, count in skipped
        ]
        splits = list((metadata.get("splits") or {}).values())
        target = _target("target")
        if any("learnt_tokens" in counts for counts in splits):
            target = ("conversations", _CONVERSATIONS)
        elif not any("cut_sources" in counts for counts in splits):  # rows as they are
            target = ("targets", "raise settings.max_length")
        for key, (what, remedy) in {
            "cut_sources": _target("source"),
            "cut_targets": target,
        }.items():
            groups.append(RowGroup("truncated", what, _sum(splits, key), remedy))
        groups.append(
            RowGroup("dropped", "longer than max_length", _sum(splits, "dropped_rows"), _DROPPED)
        )
        return cls(metadata.get("rows_read"), tuple(one for one in groups if one.num_rows))

    def num_of(self, what: str) -> int:
        """Return how many rows are skipped, truncated or dropped."""
        return sum(one.num_rows for one in self.groups if one.what == what)

    @property
    def brief(self) -> str:
        """Summary for the line of a completed stage; empty if all rows are there in full."""
        parts = []
        if skipped := self.num_of("skipped"):
            of = f" of {self.num_read:,}" if self.num_read is not None else ""
            parts.append(f"{skipped:,}{of} rows skipped")
        truncated = [one for one in self.groups if one.what == "truncated"]
        parts += [f"{_counted(one.num_rows, one.reason)} truncated" for one in truncated]
        if dropped := self.num_of("dropped"):
            parts.append(f"{_counted(dropped, 'conversations')} dropped")
        return f"({', '.join(parts)})" if parts else ""

    def notes(self) -> Iterator[str]:
        """Yield a line for each group."""
        of = f" of {self.num_read:,} rows" if self.num_read is not None else ""
        for one in self.groups:
            yield f"{one.what}: {one.num_rows:,}{of}: {one.reason} ({one.remedy})"


def own_token_notes(splits: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield how many texts begin or end with a special token, so that none was added there."""
    for key, what in (("own_starts", "begin with the start"), ("own_ends", "end with the end")):
        if number := _sum(list(splits.values()), key):
            yield (
                f"{number:,} texts {what} token in their own text: it is there once, as in the "
                "others"
            )


def _counted(number: int, plural: str) -> str:
    return f"{number:,} {plural if number > 1 else plural.removesuffix('s')}"


def _target(side: str) -> tuple[str, str]:
    return f"{side}s", f"raise max_{side}_length"


def _sum(splits: list[Mapping[str, int]], key: str) -> int:
    return sum(counts.get(key, 0) for counts in splits)

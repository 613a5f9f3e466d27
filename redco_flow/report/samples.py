"""A few predictions to read: the best, the worst and some others, with their references.

By per-example score where an evaluation stored one; the first ones otherwise. Which others are
shown depends on the predictions alone, so that a page built again shows the same ones.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from redco_flow.records import read_json_lines
from redco_flow.report.metrics import direction_of, metrics_artifact
from redco_flow.report.numbers import score
from redco_flow.report.stage_facts import StageFacts
from redco_flow.report.thumbnails import picture_url, row_thumbnails
from redco_flow.spec.secrets import hide_secrets
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.metrics_artifact import LINES_FILE as SCORES_FILE
from redco_flow.tracking.metrics_artifact import PREDICTIONS_FILE

_NUM_BEST, _NUM_WORST, _NUM_OTHERS = 3, 3, 4
_NUM_SHOWN = _NUM_BEST + _NUM_WORST + _NUM_OTHERS
_NUM_MORE = 90  # to be searched, shown on demand
_MAX_CHARACTERS = 4000
_MAX_REFERENCES = 3
_LONG, _MAX_LINES = 420, 8
_WORDS = re.compile(r"(\w+)")


@dataclass(frozen=True)
class Sample:
    """One prediction.

    Args:
        why: why it is shown: best, worst, random, first.
        scores: (metric, value) of this example.
        pieces: the prediction in pieces, and whether each is a word that no reference has.
        reference_pieces: each reference likewise, and whether it is a word that is not predicted,
            or not in this order.
        num_left_out: references that are not shown.
        picture, reference_picture: where they are pictures, as `data:` URLs in place of pieces and
            references.
        source_picture: the row's image as a `data:` URL; empty where it has none.
    """

    why: str
    row_id: str
    source: str
    pieces: tuple[tuple[str, bool], ...]
    references: tuple[str, ...]
    reference_pieces: tuple[tuple[tuple[str, bool], ...], ...]
    num_left_out: int
    scores: tuple[tuple[str, str], ...]
    picture: str = ""
    reference_picture: str = ""
    source_picture: str = ""

    @property
    def opening(self) -> str:
        """The first lines of a long source; empty for a short one, which is shown whole."""
        lines = self.source.split("\n")
        if len(self.source) <= _LONG and len(lines) <= _MAX_LINES:
            return ""
        return "\n".join(lines[: _MAX_LINES - 2])[: _LONG * 2 // 3]


@dataclass(frozen=True)
class SampleSet:
    """Samples of one predictions artifact.

    Args:
        stage: the stage that scored it, or that made it where none did.
        made_how: split and settings of generation; empty where that is not said.
        chosen_how: in words.
        num_rows: of the whole artifact.
        more: others, at random, to be searched.
    """

    stage: str
    artifact_id: str
    made_how: str
    chosen_how: str
    num_rows: int
    samples: tuple[Sample, ...]
    more: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class _Choice:
    """A row to show, and why."""

    index: int
    why: str


def sample_sets(stages: Iterable[StageFacts], store: ArtifactStore) -> list[SampleSet]:
    """Return samples of every predictions artifact of a run, scored where a stage scored them."""
    made = list(stages)
    scored: dict[str, list[tuple[str, Artifact]]] = {}
    for stage in made:
        metrics = metrics_artifact(stage, store)
        for parent in metrics.parents.values() if metrics else ():
            assert metrics is not None
            scored.setdefault(parent, []).append((stage.name, metrics))
    own = {
        one: stage.name
        for stage in made
        for output, one in stage.outputs.items()
        if output.partition("/")[0] == "predictions"
    }
    sets = []
    for artifact_id in dict.fromkeys((*own, *scored)):
        artifact = store.find(artifact_id)
        if artifact is not None and artifact.kind == "predictions":
            maker = own.get(artifact_id, "")
            sets.append(_sample_set(maker, artifact, scored.get(artifact_id, []), store))
    return [one for one in sets if one.samples]


def _sample_set(
    maker: str, artifact: Artifact, scored: Sequence[tuple[str, Artifact]], store: ArtifactStore
) -> SampleSet:
    """Return samples with the scores of the first stage that scored every example, if one did."""
    num_rows = sum(1 for _ in _rows(artifact))
    stage, metrics, scores = maker or next((name for name, _ in scored), ""), None, []
    for name, candidate in scored:
        if num_rows and len(found := _per_example(candidate)) == num_rows:
            stage, metrics, scores = name, candidate, found
            break
    directions = metrics.metadata.get("directions") or {} if metrics else {}
    how, chosen = _choose(scores, num_rows, directions, artifact.id)
    shown = {choice.index for choice in chosen}
    rest = (index for index in range(num_rows) if index not in shown)
    others = sorted(sorted(rest, key=lambda index: _draw(artifact.id, index))[:_NUM_MORE])
    wanted = shown.union(others)
    rows = {index: row for index, row in enumerate(_rows(artifact)) if index in wanted}
    in_order = dict.fromkeys([*(choice.index for choice in chosen), *others])
    ids = {index: str(rows[index].get("row_id", "")) for index in in_order}
    thumbnails = row_thumbnails(artifact, ids, store)
    target = str(artifact.metadata.get("target") or "")

    def sample(choice: _Choice) -> Sample:
        row, scored = rows[choice.index], scores[choice.index] if scores else {}
        picture = thumbnails.get(choice.index, "")
        return replace(_sample(choice.why, row, scored, target), source_picture=picture)

    samples, more = (
        tuple(map(sample, choices))
        for choices in (chosen, [_Choice(index, "random") for index in others])
    )
    made_how = ", ".join(_made_how(artifact.metadata))
    return SampleSet(stage, artifact.id, made_how, how, num_rows, samples, more)


def _choose(
    scores: Sequence[Mapping[str, float]], num_rows: int, directions: Mapping[str, str], seed: str
) -> tuple[str, list[_Choice]]:
    """Say how rows are chosen, and choose them."""
    name = next(iter(scores[0]), "") if scores else ""
    if not name:
        first = range(min(num_rows, _NUM_SHOWN))
        how = "the first ones, for there are no scores by example"
        return how, [_Choice(index, "first") for index in first]
    values = [row[name] for row in scores]
    if min(values) == max(values):
        drawn = sorted(sorted(range(num_rows), key=lambda index: _draw(seed, index))[:_NUM_SHOWN])
        how = f"at random, for all score the same by {name}"
        return how, [_Choice(index, "random") for index in drawn]
    how = f"the best and the worst by {name}, the others at random"
    return how, _by_score(values, direction_of(name, directions), seed)


def _made_how(known: Mapping[str, Any]) -> Iterator[str]:
    if known.get("split"):
        yield f"split {known['split']}"
    for key, value in (known.get("generation") or {}).items():
        if value is not None:
            yield f"{key} {value}"


def _by_score(values: Sequence[float], direction: str, seed: str) -> list[_Choice]:
    """The best, the worst, and others drawn by a hash, each row once."""
    sign = 1 if direction == "min" else -1
    ranked = sorted(range(len(values)), key=lambda index: (sign * values[index], index))
    best = ranked[:_NUM_BEST]
    worst = [index for index in ranked[::-1][:_NUM_WORST] if index not in best]
    rest = [index for index in ranked if index not in (*best, *worst)]
    others = sorted(rest, key=lambda index: _draw(seed, index))[:_NUM_OTHERS]
    return [
        *(_Choice(index, "best") for index in best),
        *(_Choice(index, "worst") for index in worst),
        *(_Choice(index, "random") for index in sorted(others)),
    ]


def _draw(seed: str, index: int) -> str:
    return hashlib.sha256(f"{seed}/{index}".encode()).hexdigest()


def _sample(why: str, row: Mapping[str, Any], scores: Mapping[str, float], target: str) -> Sample:
    """One prediction; its source is shown without the column to be predicted, `target`."""
    given, found = row.get("references") or (), row.get("prediction")
    fields = {key: value for key, value in (row.get("row") or {}).items() if key != target}
    source = row.get("source") or (json.dumps(fields, ensure_ascii=False) if fields else "")
    picture = picture_url(found)
    reference_picture = picture_url(given[0]) if isinstance(given, list) and given else ""
    # Pages are sent around: what looks like a secret in the data stays in the data.
    references = [
        hide_secrets(str(text))
        for text in ([given] if isinstance(given, str) else given)
        if not reference_picture
    ]
    prediction = hide_secrets("" if found is None or picture else str(found))
    shown = references[:_MAX_REFERENCES]
    return Sample(
        why=why,
        row_id=str(row.get("row_id", "")),
        source=_clipped(hide_secrets(str(source))),
        pieces=_pieces(prediction, references),
        references=tuple(_clipped(text) for text in shown),
        reference_pieces=tuple(_missing(text, prediction) for text in shown),
        num_left_out=max(0, len(references) - _MAX_REFERENCES),
        scores=tuple((name, score(float(value))) for name, value in scores.items()),
        picture=picture,
        reference_picture=reference_picture,
    )


def _pieces(prediction: str, references: Sequence[str]) -> tuple[tuple[str, bool], ...]:
    """Cut a prediction where words of no reference begin and end."""
    known = {word.casefold() for text in references for word in _WORDS.findall(text)}
    words = _words(prediction)
    # Without references there is nothing to compare with.
    foreign = {at for at, word in enumerate(words) if references and word not in known}
    return _cut(prediction, foreign)


def _missing(reference: str, prediction: str) -> tuple[tuple[str, bool], ...]:
    """Cut a reference where words begin and end that are not predicted, or not in this order."""
    words = _words(reference)
    blocks = SequenceMatcher(None, words, _words(prediction), autojunk=False).get_matching_blocks()
    found = {at for block in blocks for at in range(block.a, block.a + block.size)}
    return _cut(reference, set(range(len(words))) - found)


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORDS.findall(text[:_MAX_CHARACTERS])]


def _cut(text: str, marked: Container[int]) -> tuple[tuple[str, bool], ...]:
    """Cut a text into pieces, and say of each whether its words are those of these numbers."""
    pieces: list[tuple[str, bool]] = []
    # Every second part is a word.
    for index, part in enumerate(_WORDS.split(text[:_MAX_CHARACTERS])):
        is_marked = index % 2 == 1 and index // 2 in marked
        if pieces and pieces[-1][1] == is_marked:
            pieces[-1] = (pieces[-1][0] + part, is_marked)
        elif part:
            pieces.append((part, is_marked))
    return (*pieces, *((note, False) for note in _cut_note(text)))


def _clipped(text: str) -> str:
    return "".join([text[:_MAX_CHARACTERS], *_cut_note(text)])


def _cut_note(text: str) -> list[str]:
    return [f"… [{len(text):,} characters]"] if len(text) > _MAX_CHARACTERS else []


def _rows(artifact: Artifact) -> Iterator[Mapping[str, Any]]:
    yield from read_json_lines(artifact.path / PREDICTIONS_FILE)


def _per_example(metrics: Artifact) -> list[dict[str, float]]:
    """Scores by example, in the order of the predictions; none where there are none.

    A stage of the user's may make metrics in files of its own.
    """
    path = metrics.path / SCORES_FILE
    try:
        lines = [
            {str(key): float(value) for key, value in line["scores"].items()}
            for line in read_json_lines(path)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    same = all(line.keys() == lines[0].keys() for line in lines)
    return lines if lines and lines[0] and same else []

"""curate: raw rows in, out a list of those that training is better without.

The rows are read as preprocessing reads them, once for the evaluation splits' texts and once for
the training's, so that each has the split and the id that it will have there. What is there first
is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from redco_flow.errors import RedcoFlowError
from redco_flow.metrics.tokenizers import has_no_spaces
from redco_flow.recipes.find import find_recipe
from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.stages.artifacts.curation import Curation, DroppedRow, digest_of_rows
from redco_flow.stages.curate.config import Config
from redco_flow.stages.curate.text_filters import (
    EvaluationTexts,
    KeptTexts,
    quality_problem,
    words_of,
)
from redco_flow.stages.preprocess.batches import RawRows
from redco_flow.stages.preprocess.texts import text_reader
from redco_flow.text.conversations import SYSTEM_ROLES, Conversation
from redco_flow.text.pairs import PAIR_SEPARATOR

_TRAIN = "train"
_NUM_LOOKED_AT = 1000  # rows, for the script of their texts

logger = logging.getLogger(__name__)


class NothingLeft(RedcoFlowError):
    """Every row of the training would be dropped."""


def run(context: StageContext, config: Config) -> StageOutputs:
    """Judge every training row.

    Raises:
        BadRows, NoRows, DataChanged: the data cannot be used.
        NothingLeft: no row would be kept.
    """
    folder = context.work_dir / "curation"
    folder.mkdir(exist_ok=True)
    rows = _Rows(context, config)
    evaluation = None
    if config.contamination_words is not None:
        evaluation = EvaluationTexts(config.contamination_words)
        for split, row_id, texts in rows.read("reading evaluation texts"):
            if split != _TRAIN:
                evaluation.add(row_id, texts)
    curation = Curation("")
    curation.write_rows(folder, _dropped(config, rows, evaluation, curation.num_rows))
    curation.rows = digest_of_rows(config.data, rows.digests)
    curation.write_summary(folder)
    num_dropped, num_rows = sum(curation.dropped.values()), curation.num_rows[_TRAIN]
    if num_dropped == num_rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in curation.dropped.items())
        raise NothingLeft(
            f"all {num_rows} training rows would be dropped: {reasons}. Is a limit too tight?"
        )
    metadata = {
        "num_rows": curation.num_rows,
        "dropped": curation.dropped,
        "examples": curation.examples,
    }
    metrics = {"kept_share": 1 - num_dropped / num_rows}
    return StageOutputs({"curation": Output("curation", folder, metadata)}, metrics)


class _Rows:
    """The pipeline's rows, as preprocessing reads them.

    Attributes:
        digests: of the raw files, once they were read.
    """

    def __init__(self, context: StageContext, config: Config) -> None:
        self._context, self._config = context, config.preprocessing()
        self._are_chats = find_recipe(config.recipe).takes_conversations
        self.digests: Mapping[Path, str] = {}

    def read(self, phase: str) -> Iterator[tuple[str, str, list[str]]]:
        """Yield split, row id and texts of every usable row; the last text is what is learnt."""
        read_row, labels = text_reader(self._config)
        raw = RawRows(self._context, self._config, read_row)
        for block_split, batch in raw.batches(phase, is_wanted=lambda _: True):
            columns = (batch[name] for name in ("row_id", "source", "target"))
            for row_id, source, target in zip(*columns, strict=True):
                texts = self._texts(source)
                # A label is no text.
                learnt = [] if self._are_chats or labels is not None else [target]
                yield block_split.split, row_id, [*texts, *learnt]
        self.digests = raw.digests

    def _texts(self, source: str) -> list[str]:
        if self._are_chats:
            messages = Conversation.from_json(source).messages
            # The system's are the same in many rows, which do not repeat each other by it.
            said = (one for one in messages if one["role"] not in SYSTEM_ROLES)
            return [str(one.get("content", "")) for one in said]
        return source.split(PAIR_SEPARATOR) if source else []


def _dropped(
    config: Config, rows: _Rows, evaluation: EvaluationTexts | None, num_rows: dict[str, int]
) -> Iterator[DroppedRow]:
    """Yield the training rows to leave out, and count the rows of every split."""
    kept = None
    if config.near_duplicates is not None:
        kept = KeptTexts(config.near_duplicates, config.shingle_words)
    num_unspaced = 0
    for split, row_id, texts in rows.read("judging rows"):
        num_rows[split] = num_rows.get(split, 0) + 1
        if split != _TRAIN:
            continue
        if num_rows[split] <= _NUM_LOOKED_AT:
            num_unspaced += has_no_spaces("\n".join(texts))
        if found := _judge(config, evaluation, kept, row_id, texts):
            yield found
    if num_unspaced > min(num_rows.get(_TRAIN, 0), _NUM_LOOKED_AT) / 2:
        logger.warning(
            "most texts are in a script without spaces. All text between two punctuation marks "
            "counts as one word there, so only equal texts are found as duplicates, and limits in "
            "words mean little."
        )


def _judge(
    config: Config,
    evaluation: EvaluationTexts | None,
    kept: KeptTexts | None,
    row_id: str,
    texts: Sequence[str],
) -> DroppedRow | None:
    """Say why a row is left out; a text that is not is one that later ones may repeat."""
    text, by_text = "\n".join(texts), list(map(words_of, texts))
    words = list(chain.from_iterable(by_text))
    if reason := quality_problem(config, text, words):
        return DroppedRow(row_id, reason, text)
    if evaluation is not None and (twin := evaluation.twin_of(by_text)):
        return DroppedRow(row_id, "in an evaluation split", text, twin.row_id, twin.text)
    if kept is not None and (twin := kept.twin_of(row_id, text, words)):
        reason = "duplicate" if twin.similarity == 1 else "near-duplicate"
        return DroppedRow(row_id, reason, text, twin.row_id, twin.text, twin.similarity)
    return None

"""Preview which tokens of conversations are learnt, before a training: counts, and a few texts.

Of a dataset that is there, or of the first rows of raw data, encoded as the stage will do it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from redco_flow.recipes.find import find_recipe_if_any
from redco_flow.spec.stage_kind import ShownExamples
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.data.rows import BadRow
from redco_flow.stages.data.source import open_sources
from redco_flow.stages.preprocess.blocks import SplitCounts, counted_pairs
from redco_flow.stages.preprocess.config import Config
from redco_flow.stages.preprocess.heads import chat_columns
from redco_flow.stages.preprocess.texts import LEARNT, encode_call, learnt_pieces
from redco_flow.stages.preprocess.tokenizer import fetch_tokenizer
from redco_flow.text.conversations import BadConversation
from redco_flow.text.tokenizer import TextTokenizer
from redco_flow.tracking.row_counts import learnt_notes

_NUM_LOOKED_AT = 200


def show_examples(config: Config, dataset: Path | None, number: int) -> ShownExamples | None:
    """Return the first conversations of a stage's data; None where its recipe has none.

    Args:
        dataset: the directory of the stage's dataset; None: it has not run.

    Raises:
        ValueError: the tokenizer is made by the stage, or its template cannot be trained with.
    """
    recipe = find_recipe_if_any(config.recipe)
    if recipe is None or not recipe.takes_conversations:
        return None
    if dataset is not None:
        return examples_of_dataset(dataset, number)
    return examples_of_rows(config, number)


def examples_of_dataset(path: Path, number: int) -> ShownExamples:
    """Show a dataset's training split."""
    dataset = DatasetArtifact(path)
    rows = dataset.split("train")[:number]
    notes = list(learnt_notes(dataset.summary.splits["train"]))
    return ShownExamples(notes, [learnt_pieces(row, dataset.tokenizer) for row in rows])


def examples_of_rows(config: Config, number: int) -> ShownExamples:
    """Show the first training rows, of which those that cannot be used are counted alone.

    Raises:
        ValueError: the tokenizer is made by the stage, or its template cannot be trained with.
    """
    with tempfile.TemporaryDirectory(prefix="redco-flow-tokenizer-") as folder:
        directory = Path(folder)
        if not fetch_tokenizer(config, directory):
            raise ValueError(
                "its tokenizer is trained by the stage: run it first, with --until, and its "
                "dataset's examples are shown."
            )
        call = encode_call(config, directory)
        chats, bad = list[str](), list[str]()
        for one in islice(_chats(config), max(number, _NUM_LOOKED_AT)):
            (chats if isinstance(one, str) else bad).append(str(one))
        encoded = call(chats, [])
        tokenizer = TextTokenizer.load(directory)
    counts = SplitCounts()
    batch = {"row_id": encoded.windows.text_of, "references": []}
    counts.add("train", counted_pairs(batch, encoded))
    bad += [f"{reason}: {detail}" for _, reason, detail in encoded.unusable]
    rows = zip(encoded.target_ids, encoded.more[LEARNT], strict=True)
    return ShownExamples(
        [
            f"of the first {len(chats) + len(bad) - len(encoded.unusable)} rows:",
            *learnt_notes(counts.by_split()["train"]),
            *([f"{len(bad)} cannot be used, the first: {bad[0]}"] if bad else []),
        ],
        [
            learnt_pieces({"target_ids": ids, LEARNT: learnt}, tokenizer)
            for ids, learnt in islice(rows, number)
        ],
    )


def _chats(config: Config) -> Iterator[str | BadRow]:
    """Yield the training rows as conversations in JSON, or what is wrong with them."""
    columns = chat_columns(config.data)
    for source in open_sources(config.data):
        for row in source.rows() if source.split == "train" else ():
            if isinstance(row, BadRow):
                yield row
                continue
            try:
                yield columns.read(row.fields).to_json()
            except BadConversation as error:
                yield BadRow(f"{source.location}:{row.line}", error.reason, error.detail)

"""Make token ids of pairs of texts, plain texts and conversations, by a recipe's `encode`."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from redco_flow.recipes.chat.config import LEARNT
from redco_flow.recipes.declared import DEFAULT_MAX_LENGTH, TextRecipe
from redco_flow.recipes.find import find_recipe
from redco_flow.runtime.context import StageContext
from redco_flow.spec.recipe_settings import values_of
from redco_flow.stages.artifacts.arrow_split import IDS, read_batches
from redco_flow.stages.artifacts.dataset import DatasetSummary, columns_with
from redco_flow.stages.preprocess.batches import KeptPairs, RawRows
from redco_flow.stages.preprocess.blocks import BlockStore, counted_pairs, example_columns
from redco_flow.stages.preprocess.config import Config, problem_of_texts
from redco_flow.stages.preprocess.encoding import (
    MAX_COUNTED_TARGETS,
    Batches,
    Encode,
    EncodeCall,
    EncodeChats,
    Encoded,
    SplitCount,
    encode_batches,
    load_tokenizer,
)
from redco_flow.stages.preprocess.labels import Labels, NumberLabels, class_names, labels_for
from redco_flow.stages.preprocess.pairs import (
    BlockSplit,
    ReadRow,
    parts_of,
    read_chats_of,
    read_pairs_of,
    ungrouped,
)
from redco_flow.stages.preprocess.tokenizer import ensure_tokenizer, record_of
from redco_flow.text.conversations import Conversation
from redco_flow.text.pairs import PAIR_SEPARATOR
from redco_flow.text.tokenizer import TextTokenizer
from redco_flow.tracking.row_counts import learnt_notes, learnt_warnings

__all__ = ["LEARNT", "learnt_pieces", "tell_learnt"]

_MAX_TOKENS = 400

logger = logging.getLogger(__name__)


def text_reader(config: Config) -> tuple[ReadRow, Labels | None]:
    """Return what makes pairs of rows, and what reads their labels, if they have some."""
    recipe = find_recipe(config.recipe)
    labels = labels_for(recipe, values_of(config.settings))
    if recipe.takes_conversations:
        return read_chats_of(config.data), labels
    return read_pairs_of(config.data, labels), labels


def text_encoder(
    context: StageContext, config: Config, store: BlockStore
) -> tuple[TextEncoder, KeptPairs | None]:
    """Return a stage's encoder; its tokenizer is fetched or trained if it is not there.

    And the pairs, where all of them had to be read for the tokenizer.

    Raises:
        BadRows, NoRows, DataChanged: a tokenizer is to be trained on data that cannot be used.
        ValueError: the tokenizer cannot be had or trained.
    """
    read_row, labels = text_reader(config)
    kept = KeptPairs(context, RawRows(context, config, read_row), store.new_file())
    texts = _training_texts(context, config, kept)
    directory = ensure_tokenizer(context, config, store, texts)
    encoder = TextEncoder(context, config, encode_call(config, directory), read_row, labels)
    return encoder, kept if kept.is_there else None


def encode_call(config: Config, tokenizer: Path) -> Encode:
    """Return what encodes a stage's texts or conversations.

    Args:
        tokenizer: its directory.
    """
    recipe = find_recipe(config.recipe)
    assert isinstance(recipe, TextRecipe)  # others encode nothing
    if problem := problem_of_texts(config.data, recipe):
        raise ValueError(problem)
    if recipe.takes_conversations:
        return EncodeChats(
            module=recipe.module,
            tokenizer=str(tokenizer),
            template_kwargs=tuple(sorted(config.data.chat_template_kwargs.items())),
            train_on=config.train_on or "assistant",
            max_length=config.max_length or DEFAULT_MAX_LENGTH,
            on_too_long=config.on_too_long or "truncate",
        )
    return EncodeCall(
        module=recipe.module,
        tokenizer=str(tokenizer),
        is_plain_text=config.data.text_key is not None,
        are_labelled=recipe.targets is not None,
        source_prefix=config.data.source_prefix,
        source_suffix=config.data.source_suffix,
        max_source_length=config.max_source_length,
        max_target_length=config.max_target_length,
        truncation_side=config.truncation_side,
    )


@dataclass(frozen=True)
class TextEncoder:
    """Encodes batches of pairs; see `Encoder`.

    Args:
        call: what encodes a batch, in whichever process.
    """

    context: StageContext
    config: Config
    call: Encode
    read_row: ReadRow
    labels: Labels | None
    phase: str = "reading and encoding"

    def encode(self, batches: Batches) -> Generator[tuple[BlockSplit, Encoded], None, None]:
        """Encode pairs."""
        examples = ((block_split, ungrouped(batch)) for block_split, batch in batches)
        return self.encode_grouped(examples)

    def encode_grouped(self, batches: Batches) -> Generator[tuple[BlockSplit, Encoded], None, None]:
        """Encode examples that have several references each."""
        columns = columns_with(parts=parts_of(self.config.data) is not None)
        with closing(encode_batches(self.call, batches, self.config.num_workers)) as encoded:
            for block_split, batch, pairs in encoded:
                examples = example_columns(batch, pairs)
                types = {**columns, **dict.fromkeys(pairs.more, IDS)}
                counts = counted_pairs(batch, pairs)
                yield block_split, Encoded(examples, types, counts, pairs.unusable)

    def summary(self, counts: SplitCount, _paths: Mapping[str, list[Path]]) -> dict[str, Any]:
        """Return the counts, the lengths and the tokenizer."""
        tokenizer = load_tokenizer(self.call.tokenizer)
        return {
            "splits": counts,
            "max_source_length": self.config.max_source_length,
            "max_target_length": self.config.max_target_length,
            "tokenizer": record_of(tokenizer, self.context, self.config),
            "id_columns": [LEARNT] if isinstance(self.call, EncodeChats) else None,
        }

    def first_targets(self, paths: Sequence[Path]) -> list[Any]:
        """Return texts, classes or numbers."""
        targets: list[str] = []
        for batch in (batch for path in paths for batch in read_batches(path, ["references"])):
            targets += (references[0] for references in batch["references"])
            if len(targets) >= MAX_COUNTED_TARGETS:
                break
        if isinstance(self.labels, NumberLabels):
            return [float(text) for text in targets]
        by_text = {str(name): name for name in class_names(self.labels) or ()}
        return [by_text.get(text, text) for text in targets]


def _training_texts(context: StageContext, config: Config, kept: KeptPairs) -> Iterator[str]:
    """Yield every text of the training rows, in reading order."""
    data, recipe = config.data, find_recipe(config.recipe)
    for block_split, batch in kept.keep("reading for the tokenizer"):
        if block_split.split != "train":
            continue
        if recipe.takes_conversations:
            chats = map(Conversation.from_json, batch["source"])
            yield from (str(one.get("content", "")) for chat in chats for one in chat.messages)
            continue
        if data.text_key is None:
            around = data.source_prefix, data.source_suffix
            sources = (text for source in batch["source"] for text in source.split(PAIR_SEPARATOR))
            yield from (around[0] + source + around[1] for source in sources)
        if recipe.targets is None:
            yield from batch["target"]
    context.report(phase="tokenizer")


def tell_learnt(summary: DatasetSummary) -> None:
    """Log it for each split of a dataset of conversations."""
    for split, counts in summary.splits.items():
        if "learnt_tokens" not in counts:
            continue
        warnings = list(learnt_warnings(counts))
        for note in learnt_notes(counts):
            logger.log(logging.WARNING if note in warnings else logging.INFO, "%s: %s", split, note)


def learnt_pieces(example: Mapping[str, Any], tokenizer: TextTokenizer) -> list[list[Any]]:
    """Return an encoded conversation's text in pieces, and whether each is learnt.

    Of a long one the beginning: 400 tokens.
    """
    ids = [int(token) for token in example["target_ids"]]
    edges = [0, *map(int, example[LEARNT]), len(ids)]
    pieces = []
    for number, (begin, end) in enumerate(pairwise(edges)):
        part = ids[begin : min(end, _MAX_TOKENS)]
        if part:
            text = tokenizer.backend.decode(part, skip_special_tokens=False)
            pieces.append([text, number % 2 == 1])
    return pieces

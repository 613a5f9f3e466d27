"""The functions of an encoder-decoder trained on pairs of texts.

Brings together a model family, a tokenizer and the engine's three functions.
Dims in this file: B batch, S source, T target, V vocabulary, N examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from redco_flow.engine.step.chunked_loss import NumChunks, chunked_cross_entropy
from redco_flow.engine.step.loss import IGNORED_LABEL, PerExample
from redco_flow.recipes.parts.model import (
    Row,
    checked_ids,
    choose_model,
    end_ids,
    make_pred_fn,
    padded,
    with_changes,
)
from redco_flow.recipes.recipe import Batch, Collate, Example, Recipe
from redco_flow.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from redco_flow.recipes.recipe import Lengths


def build_encoder_decoder(
    model: Mapping[str, Any], tokenizer: TextTokenizer, *, source_length: int, target_length: int
) -> Recipe:
    """Make the recipe; see `recipes.text_to_text.build`."""
    special_tokens = {
        "pad_token_id": tokenizer.pad_id,
        "eos_token_id": tokenizer.eos_id,
        "decoder_start_token_id": tokenizer.pad_id,
    }
    chosen = choose_model(model, tokenizer, recipe="text_to_text", special_tokens=special_tokens)
    module, config = chosen.module, chosen.config
    check_special_tokens(config, tokenizer)

    def collate_to(widths: Sequence[int]) -> Collate:
        source_width, target_width = widths
        return partial(
            collate,
            source_length=source_width,
            target_length=target_width,
            vocab_size=config.vocab_size,
            pad_id=config.pad_token_id,
            start_id=config.decoder_start_token_id,
        )

    def prompts_to(widths: Sequence[int]) -> Collate:
        (width,) = widths
        return partial(
            collate_sources, length=width, vocab_size=config.vocab_size, pad_id=config.pad_token_id
        )

    def with_config(changes: Mapping[str, Any]) -> Recipe:
        changed = with_changes(model, changes)
        lengths = {"source_length": source_length, "target_length": target_length}
        return build_encoder_decoder(changed, tokenizer, **lengths)

    return Recipe(
        model=chosen.record,
        init_params=partial(module.init_params, config),
        abstract_params=partial(module.abstract_params, config),
        load_params=chosen.load_params,
        collate_fn=collate_to((source_length, target_length)),
        collate_prompts=prompts_to((source_length,)),
        row_widths=_row_widths,
        collate_to=collate_to,
        collate_packed=None,
        loss_fn=partial(_loss, module, config, "auto"),
        loss_in_chunks=partial(partial, _loss, module, config),
        make_pred_fn=partial(make_pred_fn, module, config),
        output_fn=partial(tokenizer.decode_until_end, end_ids=end_ids(chosen.record)),
        save_pretrained=chosen.save,
        prompt_widths=lambda source_lengths: source_lengths[:, None],
        collate_prompts_to=prompts_to,
        with_config=with_config,
    )


def collate(
    examples: Sequence[Example],
    *,
    source_length: int,
    target_length: int,
    vocab_size: int,
    pad_id: int,
    start_id: int,
) -> Batch:
    """Pad examples to one shape and shift the targets right, once.

    Returns:
        input_ids, attention_mask (B, S); decoder_input_ids, labels (B, T), int32. Labels are the
        target ids as they are, IGNORED_LABEL after them; decoder inputs are the start token and
        all labels but the last.

    Raises:
        ValueError: a token id outside the vocabulary, or more tokens than the batch is wide.
    """
    sources = collate_sources(examples, length=source_length, vocab_size=vocab_size, pad_id=pad_id)
    targets = [checked_ids(one, "target_ids", target_length, vocab_size) for one in examples]
    return {**sources, **shift_targets(targets, target_length, pad_id=pad_id, start_id=start_id)}


def shift_targets(targets: Sequence[Row], length: int, *, pad_id: int, start_id: int) -> Batch:
    """Return labels (B, T), and the same shifted right, which the decoder reads."""
    labels = padded(targets, length, IGNORED_LABEL)
    shifted = np.full_like(labels, start_id)
    shifted[:, 1:] = np.where(labels[:, :-1] == IGNORED_LABEL, pad_id, labels[:, :-1])
    return {"decoder_input_ids": shifted, "labels": labels}


def collate_sources(
    examples: Sequence[Example], *, length: int, vocab_size: int, pad_id: int
) -> Batch:
    """Pad the sources alone; returns and raises as `collate`."""
    sources = [checked_ids(one, "source_ids", length, vocab_size) for one in examples]
    lengths = np.array([len(ids) for ids in sources])
    return {
        "input_ids": padded(sources, length, pad_id),
        "attention_mask": (np.arange(length) < lengths[:, None]).astype(np.int32),
    }


def _row_widths(source_lengths: Lengths, target_lengths: Lengths) -> Lengths:
    """Source and target are padded apart: (N, 2)."""
    return np.stack([source_lengths, target_lengths], axis=1)


def _loss(
    module: ModuleType,
    config: Any,
    num_chunks: NumChunks,
    params: Any,
    batch: Mapping[str, jax.Array],
    rngs: jax.Array,
    is_training: bool,  # noqa: FBT001 (the engine's order of arguments)
    **of_training: Any,
) -> PerExample:
    """Summed cross-entropy, in training with these options, and number of target tokens."""
    hidden, head, _ = module.apply_before_head(
        config,
        params,
        batch["input_ids"],
        batch["attention_mask"],
        batch["decoder_input_ids"],
        rngs=rngs if is_training else None,
    )
    score = partial(module.score, config)
    return chunked_cross_entropy(
        score,
        head,
        hidden,
        batch["labels"],
        num_chunks=num_chunks,
        **(of_training if is_training else {}),
    )


def check_special_tokens(config: Any, tokenizer: TextTokenizer) -> None:
    """Raise ValueError if a model pads or ends texts otherwise than the tokenizer."""
    for name, token in (("pad_token_id", tokenizer.pad_id), ("eos_token_id", tokenizer.eos_id)):
        known = getattr(config, name)
        if token not in (known if isinstance(known, tuple) else (known,)):
            raise ValueError(
                f"the model's {name} is {known}, the tokenizer's is {token}: "
                "the data was preprocessed with a tokenizer that is not this model's."
            )

"""The functions of a decoder-only model trained on targets after prompts, or on plain texts.

A row is a prompt that goes over into its target; its loss is that of the target's tokens. Brings
together a model family, a tokenizer and the engine's three functions.
Dims in this file: B batch, T tokens of a row, P of a prompt, N examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.engine.data.packing import POSITION_IDS, SEGMENT_IDS, collate_packed
from redco_flow.engine.step.chunked_loss import NumChunks, chunked_cross_entropy
from redco_flow.engine.step.loss import IGNORED_LABEL, Measured, PerExample, cross_entropy
from redco_flow.models.feed_forward.experts import load_balancing_losses
from redco_flow.recipes.parts.model import (
    ChosenModel,
    Row,
    checked_ids,
    choose_model,
    decoder_tokens,
    end_ids,
    make_pred_fn,
    padded,
    rounded_up,
    with_changes,
)
from redco_flow.recipes.recipe import (
    Batch,
    Collate,
    CollatePacked,
    Example,
    Generation,
    Recipe,
    TokenLikelihoods,
)
from redco_flow.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from redco_flow.recipes.recipe import Lengths


_SCORED_AT_ONCE = 64  # positions whose logits are in memory
_DEFAULT_MAX_LENGTH = 2048  # where a model's config says none, as of lm-eval's own models


@dataclass(frozen=True)
class Rows:
    """Collates examples into rows of token ids.

    Args:
        prefix: what every row begins with.
        start: what a row without a prompt begins with, for its first token needs one before it.
        source_length, target_length: of the longest prompt and target.
        is_whole: whether targets hold all of a row, as conversations do: prompts are then read to
            generate alone, and `learnt` has the tokens [begin, end, begin, …) that are learnt.
    """

    prefix: tuple[int, ...]
    start: tuple[int, ...]
    source_length: int
    target_length: int
    vocab_size: int
    pad_id: int
    is_whole: bool = False

    @property
    def longest(self) -> int:
        """Tokens of the longest row that there may be, without rounding."""
        before = max(self.source_length + len(self.prefix), len(self.start))
        return self.target_length - 1 + (0 if self.is_whole else before)

    @property
    def width(self) -> int:
        """T of the longest row, with room for what begins one without a prompt."""
        before = 0 if self.is_whole else self.source_length + len(self.start)
        return rounded_up(before + self.target_length - 1)

    @property
    def prompt_width(self) -> int:
        """P of the longest prompt."""
        return rounded_up(self.source_length + len(self.start))

    def prompt(self, example: Example) -> Row:
        """The tokens before an example's target; at least one."""
        ids = checked_ids(example, "source_ids", self.source_length, self.vocab_size)
        begin = self.prefix if len(ids) else self.start
        return np.concatenate([np.asarray(begin, np.int32), ids])

    def columns(self, example: Example) -> dict[str, Row]:
        """Inputs and labels of one row: each label is the next token, where it is a target's."""
        target = checked_ids(example, "target_ids", self.target_length, self.vocab_size)
        if self.is_whole:
            return {"input_ids": target[:-1], "labels": _learnt(example, target)[1:]}
        prompt = self.prompt(example)
        ignored = np.full(len(prompt) - 1, IGNORED_LABEL, np.int32)
        return {
            "input_ids": np.concatenate([prompt, target[:-1]]),
            "labels": np.concatenate([ignored, target]),
        }

    def lengths(self, source_lengths: Lengths, target_lengths: Lengths) -> Lengths:
        """Tokens of each row, (N, 1)."""
        if self.is_whole:
            return target_lengths[:, None] - 1
        return self.prompt_lengths(source_lengths) + target_lengths[:, None] - 1

    def prompt_lengths(self, source_lengths: Lengths) -> Lengths:
        """Tokens of each prompt, (N, 1)."""
        begin = np.where(source_lengths > 0, len(self.prefix), len(self.start))
        return (begin + source_lengths)[:, None]

    def collate(self, examples: Sequence[Example], width: int) -> Batch:
        """Return input_ids and labels (B, T), padded on the right."""
        columns = [self.columns(example) for example in examples]
        _check_fits(examples, [row["labels"] for row in columns], width, "prompt and target have")
        return {
            "input_ids": padded([row["input_ids"] for row in columns], width, self.pad_id),
            "labels": padded([row["labels"] for row in columns], width, IGNORED_LABEL),
        }

    def collate_packed(self, rows: Sequence[Sequence[Example]], width: int) -> Batch:
        """Return input_ids, labels, segment_ids and position_ids (B, T)."""
        columns = [[self.columns(example) for example in row] for row in rows]
        padding = {"input_ids": self.pad_id, "labels": IGNORED_LABEL}
        return dict(collate_packed(columns, padding, width))

    def collate_prompts(self, examples: Sequence[Example], width: int) -> Batch:
        """Return input_ids and attention_mask (B, P), padded on the left."""
        prompts = [self.prompt(example) for example in examples]
        _check_fits(examples, prompts, width, "the prompt has")
        lengths = np.array([len(prompt) for prompt in prompts])
        mask = np.arange(width) >= width - lengths[:, None]
        return {
            "input_ids": padded(prompts, width, self.pad_id, on_the_left=True),
            "attention_mask": mask.astype(np.int32),
        }


def build_decoder_only(
    model: Mapping[str, Any],
    tokenizer: TextTokenizer,
    *,
    source_length: int,
    target_length: int,
    is_whole: bool = False,
) -> Recipe:
    """Make the recipe; see `recipes.language_modeling.build`.

    Args:
        is_whole: whether targets hold their prompts, with every special token (`recipes.chat`).
    """
    special_tokens = decoder_tokens(tokenizer)
    chosen = choose_model(
        model, tokenizer, recipe="language_modeling", special_tokens=special_tokens
    )
    module, config = chosen.module, chosen.config
    _check_end_token(chosen, tokenizer)
    rows = Rows(
        prefix=() if is_whole else tokenizer.prefix_ids,
        start=() if is_whole else tokenizer.prefix_ids or (tokenizer.eos_id,),
        source_length=source_length,
        target_length=target_length,
        vocab_size=config.vocab_size,
        pad_id=tokenizer.pad_id,
        is_whole=is_whole,
    )
    _check_positions(chosen, rows.longest, "prompt and target" if source_length else "texts")

    def collate_to(widths: Sequence[int]) -> Collate:
        (width,) = widths
        return partial(rows.collate, width=width)

    def prompts_to(widths: Sequence[int]) -> Collate:
        (width,) = widths
        return partial(rows.collate_prompts, width=width)

    def packed_to(width: int) -> CollatePacked:
        return partial(rows.collate_packed, width=width)

    def pred_fn(generation: Generation) -> Callable[..., jax.Array]:
        prompt_length = source_length + len(rows.start)
        _check_positions(chosen, prompt_length + generation.max_length - 1, "prompt and new text")
        return make_pred_fn(module, config, generation)

    def with_config(changes: Mapping[str, Any]) -> Recipe:
        changed = with_changes(model, changes)
        lengths = {"source_length": source_length, "target_length": target_length}
        return build_decoder_only(changed, tokenizer, **lengths, is_whole=is_whole)

    return Recipe(
        model=chosen.record,
        init_params=partial(module.init_params, config),
        abstract_params=partial(module.abstract_params, config),
        load_params=chosen.load_params,
        collate_fn=collate_to((rows.width,)),
        collate_prompts=prompts_to((rows.prompt_width,)),
        row_widths=rows.lengths,
        collate_to=collate_to,
        collate_packed=packed_to,
        loss_fn=partial(_loss, chosen, "auto"),
        loss_in_chunks=partial(partial, _loss, chosen),
        make_pred_fn=pred_fn,
        output_fn=partial(tokenizer.decode_until_end, end_ids=end_ids(chosen.record)),
        save_pretrained=chosen.save,
        prompt_widths=rows.prompt_lengths,
        collate_prompts_to=prompts_to,
        with_config=with_config,
        token_likelihoods=_token_likelihoods(chosen, rows.pad_id),
    )


def _learnt(example: Example, ids: Row) -> Row:
    """Return the ids, ignored where they are not learnt."""
    labels = np.full(len(ids), IGNORED_LABEL, np.int32)
    spans = np.asarray(example.get("learnt", (0, len(ids))), np.int64).reshape(-1, 2)
    for begin, end in spans:
        labels[begin:end] = ids[begin:end]
    return labels


def _loss(
    chosen: ChosenModel,
    num_chunks: NumChunks,
    params: Any,
    batch: Mapping[str, jax.Array],
    rngs: jax.Array,
    is_training: bool,  # noqa: FBT001 (the engine's order of arguments)
    **of_training: Any,
) -> PerExample | Measured:
    """Summed cross-entropy and number of target tokens of each row.

    Training has `of_training`, options of `chunked_cross_entropy`, and adds what its router costs
    to a mixture whose config says so; an evaluation does not, so that its loss stays that of the
    texts.
    """
    # Padding on the right needs no mask: no token looks ahead, and its own labels are ignored.
    hidden, head, router_logits = chosen.module.apply_before_head(
        chosen.config,
        params,
        batch["input_ids"],
        position_ids=batch.get(POSITION_IDS),
        segment_ids=batch.get(SEGMENT_IDS),
        rngs=rngs if is_training else None,
    )
    score = partial(chosen.module.score, chosen.config)
    totals, weights = chunked_cross_entropy(
        score,
        head,
        hidden,
        batch["labels"],
        num_chunks=num_chunks,
        **(of_training if is_training else {}),
    )
    if not (is_training and getattr(chosen.config, "output_router_logits", False)):
        return totals, weights
    balance = sum_balance(chosen.config, router_logits, batch)
    totals += chosen.config.router_aux_loss_coef * balance
    return totals, weights, {"load_balancing_loss": balance}


def _token_likelihoods(chosen: ChosenModel, pad_id: int) -> TokenLikelihoods:
    longest = chosen.config.core.max_length
    if math.isinf(longest):
        longest = getattr(chosen.config, "max_position_embeddings", _DEFAULT_MAX_LENGTH)

    def collate_to(widths: Sequence[int]) -> Collate:
        (width,) = widths
        return partial(_collate_ids, width, pad_id)

    return TokenLikelihoods(collate_to, partial(_score_tokens, chosen), int(longest))


def _collate_ids(width: int, pad_id: int, examples: Sequence[Example]) -> Batch:
    """Return input_ids and labels (B, T): each label is the next id, where it is to be scored."""
    inputs, labels = [], []
    for example in examples:
        context = np.asarray(example["context_ids"], np.int32)
        continuation = np.asarray(example["continuation_ids"], np.int32)
        ignored = np.full(len(context) - 1, IGNORED_LABEL, np.int32)
        inputs.append(np.concatenate([context, continuation[:-1]]))
        labels.append(np.concatenate([ignored, continuation]))
    return {
        "input_ids": padded(inputs, width, pad_id),
        "labels": padded(labels, width, IGNORED_LABEL),
    }


def _score_tokens(
    chosen: ChosenModel, params: Any, batch: Mapping[str, jax.Array], rngs: jax.Array
) -> dict[str, jax.Array]:
    """Return what a `TokenLikelihoods` promises; few positions' logits are there at a time."""
    hidden, head, _ = chosen.module.apply_before_head(chosen.config, params, batch["input_ids"])

    def score_chunk(chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = chosen.module.score(chosen.config, head, chunk[0])
        labels = chunk[1]
        totals, _ = cross_entropy(logits, labels)
        is_likeliest = (jnp.argmax(logits, axis=-1) == labels) | (labels == IGNORED_LABEL)
        return totals, jnp.all(is_likeliest, axis=1)

    chunks = tuple(_cut(array) for array in (hidden, batch["labels"]))
    totals, are_greedy = jax.lax.map(score_chunk, chunks)
    return {"log_likelihood": -jnp.sum(totals, axis=0), "is_greedy": jnp.all(are_greedy, axis=0)}


def _cut(array: jax.Array) -> jax.Array:
    """Cut (B, T, ...) along T into parts of at most `_SCORED_AT_ONCE`: (C, B, T / C, ...)."""
    batch, length, *rest = array.shape
    size = max(n for n in range(1, _SCORED_AT_ONCE + 1) if length % n == 0)
    parts = array.reshape(batch, length // size, size, *rest)
    return jnp.moveaxis(parts, 1, 0)


def sum_balance(config: Any, router_logits: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Sum the load-balancing losses of each row's target tokens: (B,)."""
    is_target = batch["labels"] >= 0
    # A text ends with a target: what stands behind a row's last one is padding.
    is_token = jax.lax.cummax(is_target.astype(jnp.int32), axis=1, reverse=True)
    losses = load_balancing_losses(
        router_logits, config.num_experts_per_tok, is_token, batch.get(SEGMENT_IDS)
    )
    return jnp.sum(losses * is_target, axis=1)


def _check_fits(examples: Sequence[Example], rows: Sequence[Row], width: int, what: str) -> None:
    for example, row in zip(examples, rows, strict=True):
        if len(row) > width:
            raise ValueError(
                f"{example.get('row_id', 'an example')}: {what} {len(row)} tokens; batches are "
                f"{width} wide."
            )


def _check_end_token(chosen: ChosenModel, tokenizer: TextTokenizer) -> None:
    ends = chosen.config.eos_token_ids
    if tokenizer.eos_id not in ends:
        raise ValueError(
            f"the model ends texts with token {', '.join(map(str, ends)) or '(none)'}, the "
            f"tokenizer with {tokenizer.eos_id}: generated texts would not end. Use the model's "
            f"tokenizer, or set model.config.eos_token_id to {tokenizer.eos_id}."
        )


def _check_positions(chosen: ChosenModel, length: int, what: str) -> None:
    """Refuse rows beyond the positions: a learned table's last would be read for all."""
    core = getattr(chosen.config, "core", None)
    if core is not None and length > core.max_length:
        raise ValueError(
            f"{what} have up to {length} tokens, and the model's positions reach "
            f"{core.max_length}: lower {'max_source_length or ' * ('prompt' in what)}"
            "max_target_length."
        )

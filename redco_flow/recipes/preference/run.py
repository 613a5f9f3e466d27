"""The functions of a decoder-only model that learns which of two answers is the better one.

Each answer is a row as language_modeling makes it, of ids with all special tokens, and both go
through the model in one batch.
Dims in this file: B pairs; 2 answers, the chosen one first; T tokens of a row, N examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.engine.step.chunked_loss import NumChunks, chunked_cross_entropy
from redco_flow.engine.step.loss import Measured
from redco_flow.recipes.language_modeling.run import Rows, build_decoder_only, sum_balance
from redco_flow.recipes.parts.model import (
    ChosenModel,
    choose_model,
    decoder_tokens,
    rounded_up,
    with_changes,
)
from redco_flow.recipes.parts.outputs import as_json, rows_of
from redco_flow.recipes.preference.config import Loss, Settings, needs_reference
from redco_flow.recipes.preference.losses import PairScores, implicit_rewards, pair_losses
from redco_flow.recipes.recipe import Batch, Collate, Example, Recipe, TokenLengths

if TYPE_CHECKING:
    from redco_flow.recipes.recipe import Lengths

REFERENCE = "reference"
ANSWERS = ("chosen", "rejected")
_OF_TOKENS = ("input_ids", "labels")


def build_preference(model: Mapping[str, Any], texts: TokenLengths, settings: Settings) -> Recipe:
    """Make the recipe; see `recipes.preference.build`."""
    tokenizer = texts.tokenizer
    model = {**model, "config": {"dropout_rate": 0.0, **(model.get("config") or {})}}
    special_tokens = decoder_tokens(tokenizer)
    chosen = choose_model(model, tokenizer, recipe="preference", special_tokens=special_tokens)
    longest = texts.source_length + texts.target_length
    base = build_decoder_only(model, tokenizer, source_length=longest - 1, target_length=1)
    rows = Rows(
        prefix=(),
        start=(),
        source_length=longest,
        target_length=longest,
        vocab_size=chosen.config.vocab_size,
        pad_id=tokenizer.pad_id,
    )
    pairs = _Pairs(chosen, settings.loss)

    def collate_to(widths: Sequence[int]) -> Collate:
        (width,) = widths
        return partial(_collate, partial(rows.collate, width=width))

    def loss_in_chunks(num_chunks: NumChunks, z_loss: float = 0.0) -> Callable[..., Measured]:
        if z_loss:
            raise ValueError("z_loss is of a cross-entropy, and recipe 'preference' has none.")
        return partial(pairs.loss, num_chunks)

    def with_config(changes: Mapping[str, Any]) -> Recipe:
        return build_preference(with_changes(model, changes), texts, settings)

    return Recipe(
        model={**base.model, "settings": settings.model_dump(mode="json")},
        init_params=base.init_params,
        abstract_params=base.abstract_params,
        load_params=base.load_params,
        collate_fn=collate_to((rounded_up(longest - 1),)),
        id_widths=partial(_id_widths, rows),
        collate_to=collate_to,
        loss_fn=loss_in_chunks("auto"),
        loss_in_chunks=loss_in_chunks,
        make_pred_fn=lambda _generation: pairs.predict,
        output_fn=lambda found: [as_json(row) for row in rows_of(found)],
        save_pretrained=base.save_pretrained,
        with_config=with_config,
    )


def _collate(collate_row: Collate, examples: Sequence[Example]) -> Batch:
    """Return input_ids and labels (B, 2, T), and `reference` (B, 2) where examples have it."""
    sides = [collate_row([_row(example, name) for example in examples]) for name in ANSWERS]
    batch: Batch = {key: np.stack([side[key] for side in sides], axis=1) for key in sides[0]}
    if all(f"{REFERENCE}_{ANSWERS[0]}" in example for example in examples):
        scores = [[example[f"{REFERENCE}_{name}"] for name in ANSWERS] for example in examples]
        batch[REFERENCE] = np.array(scores, np.float32)
    return batch


def _row(example: Example, answer: str) -> Example:
    """Return a prompt with one of its answers as an example of language_modeling."""
    return {
        "row_id": example.get("row_id", "an example"),
        "source_ids": example["source_ids"],
        "target_ids": example[f"{answer}_ids"],
    }


def _id_widths(rows: Rows, lengths: Callable[[str], Lengths]) -> Lengths:
    """Return how wide a row of the longer answer is, (N, 1)."""
    longer = np.maximum(*(lengths(f"{name}_ids") for name in ANSWERS))
    return rows.lengths(lengths("source_ids"), longer)


@dataclass(frozen=True)
class _Pairs:
    """A model that scores pairs of answers, and what it learns of them."""

    model: ChosenModel
    asked: Loss

    def scores(
        self,
        num_chunks: NumChunks,
        params: Any,
        batch: Mapping[str, jax.Array],
        rngs: jax.Array | None,
    ) -> tuple[PairScores, jax.Array | None]:
        """Return how likely the model finds both answers, and a mixture's load-balancing losses.

        Those are (B,), of both rows' mean, where the config says that a training adds them.
        """
        module, config = self.model.module, self.model.config
        keys = None if rngs is None else jax.vmap(jax.random.split)(rngs).reshape(-1)
        # Both rows of a pair stay on the shard that has the pair.
        rows = {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in _OF_TOKENS}
        hidden, head, router_logits = module.apply_before_head(
            config, params, rows["input_ids"], rngs=keys
        )
        losses, num_tokens = chunked_cross_entropy(
            partial(module.score, config),
            head,
            hidden,
            rows["labels"],
            num_chunks=num_chunks,
            equal_weights=False,
        )
        balance = None
        if getattr(config, "output_router_logits", False):
            of_rows = sum_balance(config, router_logits, rows) / num_tokens
            balance = jnp.mean(of_rows.reshape(-1, 2), axis=1)
        pairs = (-losses.reshape(-1, 2), num_tokens.reshape(-1, 2))
        return PairScores(*pairs, batch.get(REFERENCE)), balance

    def loss(
        self,
        num_chunks: NumChunks,
        params: Any,
        batch: Mapping[str, jax.Array],
        rngs: jax.Array,
        is_training: bool,  # noqa: FBT001 (the engine's order of arguments)
    ) -> Measured:
        """Return each pair's loss, its weight, 1, and what TRL logs of it, by TRL's names."""
        scores, balance = self.scores(num_chunks, params, batch, rngs if is_training else None)
        losses = pair_losses(self.asked, scores)
        rewards = implicit_rewards(self.asked, scores)
        margins = rewards[:, 0] - rewards[:, 1]
        measures = {"rewards/margins": margins, "rewards/accuracies": margins > 0}
        for index, name in enumerate(ANSWERS):
            measures[f"rewards/{name}"] = rewards[:, index]
            measures[f"logps/{name}"] = scores.log_likelihoods[:, index]
        if is_training and balance is not None:
            losses += self.model.config.router_aux_loss_coef * balance
            measures["load_balancing_loss"] = balance
        return losses, jnp.ones_like(losses), measures

    def predict(self, params: Any, batch: Mapping[str, jax.Array], _rngs: Any) -> dict[str, Any]:
        """Return log-likelihoods (B,) of both answers, and rewards where they can be computed."""
        scores, _ = self.scores("auto", params, batch, None)
        found = {"log_likelihood": scores.log_likelihoods}
        if scores.reference is not None or not needs_reference(Settings(loss=self.asked)):
            found["reward"] = implicit_rewards(self.asked, scores)
        return {
            f"{name}_{key}": values[:, index]
            for key, values in found.items()
            for index, name in enumerate(ANSWERS)
        }

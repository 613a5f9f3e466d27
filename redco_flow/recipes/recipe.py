"""A recipe around one model: the functions that training and prediction call, and their types.

What a recipe's module declares, from which this is made: `recipes.declared`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from redco_flow.errors import UnusableRow

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from redco_flow.text.tokenizer import TextTokenizer

    Lengths = NDArray[np.int64]

Example = Mapping[str, Any]
Class = str | int
Batch = dict[str, Any]
Collate = Callable[[Sequence[Example]], Batch]
CollatePacked = Callable[[Sequence[Sequence[Example]]], Batch]


@dataclass(frozen=True)
class RandomChoice:
    """Changes of the model's distribution before a token is sampled from it.

    Args:
        temperature: what logits are divided by; towards 0 the likeliest token wins.
        top_k: only the `top_k` likeliest tokens may be drawn; None: all.
        top_p: of those, only the fewest likeliest whose probabilities reach this sum.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


@dataclass(frozen=True)
class Generation:
    """Settings of text generation.

    Args:
        max_length: tokens to generate at most, the end token included.
        num_beams: 1 is greedy search.
        length_penalty: a beam's score is divided by its length to this power.
        early_stopping: when beam search ends a row: True with the first `num_beams` texts that
            ended, False when the best other one is no better as long as it is, "never" when it
            could not be at any length.
        repetition_penalty: more than 1 makes tokens that the text has less likely.
        no_repeat_ngram_size: no n-gram of this length occurs twice; 0: any may.
        min_new_tokens: no text ends before.
        sampling: draw tokens, by each example's own key, instead of searching.
        num_return_sequences: texts of each example; the first is the one that counts.
        on_token: called with each token of the batch as it is chosen, (tokens (B,), position), and
            returns which texts end with it (B,); not of beams.
    """

    max_length: int
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    sampling: RandomChoice | None = None
    num_return_sequences: int = 1
    on_token: Callable[[Any, Any], Any] | None = None


class BadExample(UnusableRow):
    """A row that a recipe cannot use."""


@dataclass(frozen=True)
class TokenLikelihoods:
    """Log-likelihoods of continuations under a decoder-only model, without prompts or templates.

    Args:
        collate_to: (T,) -> a collate_fn of examples with `context_ids` and `continuation_ids`,
            which nothing is put before; together they have at most T + 1 ids.
        score_fn: (params, batch, rngs) -> `log_likelihood` (B,), summed over the continuation, in
            nats, and `is_greedy` (B,): whether each of its tokens is the likeliest one.
        max_length: the most tokens that the model reads at once.
    """

    collate_to: Callable[[Sequence[int]], Collate]
    score_fn: Callable[[Any, Batch, Any], Mapping[str, Any]]
    max_length: int


@dataclass(frozen=True)
class Recipe:
    """A paradigm's three functions around one model; what only texts have is optional.

    Args:
        model: JSON from which the same recipe can be made, without any file.
        init_params: (key) -> freshly initialised parameters; can be jitted.
        abstract_params: () -> their shapes and dtypes, allocating nothing.
        collate_fn: examples -> arrays with a leading batch dim, padded to the longest lengths.
        loss_fn: (params, batch, rngs, is_training) -> a scalar, or (totals (B,), weights (B,)), and
            what else is measured as a third, {name: totals (B,)}.
        make_pred_fn: Generation -> (params, batch, rngs) -> arrays (B, ...); of generated texts
            token ids (B, T), or (B, N, T) where N sequences are asked for, and N is not 1.
        output_fn: those arrays -> a JSON value per row; of token ids, texts.
        class_scores: (params, batch, rngs) -> each class's logit (B, C), in the order of
            `settings.classes`; None for recipes without classes or without their scores.
        collate_prompts: examples -> what `make_pred_fn`'s functions take, padded to the longest
            length; None: as `collate_fn`.
        load_params: (shardings) -> parameters read from the model's files, or None where the
            model has none and starts from random parameters.
        row_widths: (tokens of each source (N,), of each target (N,)) -> (N, D): how wide a batch
            must be for each example, in each of the D dims that are padded; None where batches
            have one shape.
        id_widths: (column -> tokens of each row's (N,)) -> (N, D): as `row_widths`, of a recipe
            with `encode_row`.
        collate_to: (D widths) -> a collate_fn that pads to those; None likewise.
        collate_packed: (width) -> lists of examples -> arrays in which each list shares a row;
            None where examples cannot share one.
        save_pretrained: (params, directory): write the model in Hugging Face's format; None where
            there is no such format.
        prompt_widths: (tokens of each source (N,)) -> (N, D): how wide a batch of prompts must be
            for each example; None where all such batches are as wide as `collate_prompts`'.
        collate_prompts_to: (D widths) -> a collate_prompts that pads to those; None likewise.
        loss_in_chunks: ("auto" or the number of chunks) -> a loss_fn that scores the vocabulary
            chunk by chunk; with `z_loss=…`, `label_smoothing=…` or `logits_dtype=…` where the
            setting is not the default, which training alone has. None where the recipe has none.
        with_config: (changes of the model's config) -> this recipe of the model that has them;
            None where the recipe makes none.
        token_likelihoods: how likely the model finds given tokens; None where it cannot tell.
        head_parts: names at the top of the parameters' tree of a head of labels, and of whatever
            else the model's files do not have, so that it is drawn: low-rank adaptation trains
            these parts in full.
        drawn_parts: those of them that `load_params` does not read; a training draws them by its
            own seed.
    """

    model: Mapping[str, Any]
    init_params: Callable[[Any], Any]
    abstract_params: Callable[[], Any]
    collate_fn: Collate
    loss_fn: Callable[[Any, Batch, Any, bool], Any]
    make_pred_fn: Callable[[Generation], Callable[[Any, Batch, Any], Any]]
    output_fn: Callable[[Any], Sequence[Any]]
    class_scores: Callable[[Any, Batch, Any], Any] | None = None
    collate_prompts: Collate | None = None
    load_params: Callable[[Any], Any] | None = None
    row_widths: Callable[[Lengths, Lengths], Lengths] | None = None
    id_widths: Callable[[Callable[[str], Lengths]], Lengths] | None = None
    collate_to: Callable[[Sequence[int]], Collate] | None = None
    collate_packed: Callable[[int], CollatePacked] | None = None
    save_pretrained: Callable[[Any, Path], None] | None = None
    prompt_widths: Callable[[Lengths], Lengths] | None = None
    collate_prompts_to: Callable[[Sequence[int]], Collate] | None = None
    loss_in_chunks: Callable[..., Callable[[Any, Batch, Any, bool], Any]] | None = None
    with_config: Callable[[Mapping[str, Any]], Recipe] | None = None
    token_likelihoods: TokenLikelihoods | None = None
    head_parts: tuple[str, ...] = ()
    drawn_parts: tuple[str, ...] = ()

    @property
    def collate_for_prediction(self) -> Collate:
        """The collate function for `make_pred_fn`'s functions."""
        return self.collate_prompts or self.collate_fn

    def collate_wide(self, widths: Sequence[int]) -> Collate:
        """Return the collate_fn of some widths, which a recipe with `row_widths` has."""
        assert self.collate_to is not None, "row_widths without collate_to"
        return self.collate_to(widths)

    def widths_of(self, lengths: Callable[[str], Lengths]) -> Lengths:
        """Return how wide a batch must be for each example, (N, D), given its columns' lengths."""
        if self.id_widths is not None:
            return self.id_widths(lengths)
        assert self.row_widths is not None, "a recipe of token ids says how wide their rows are"
        return self.row_widths(lengths("source_ids"), lengths("target_ids"))

    @property
    def has_widths(self) -> bool:
        """Whether batches may have several shapes."""
        return self.row_widths is not None or self.id_widths is not None


@dataclass(frozen=True)
class TokenLengths:
    """The tokenizer that a recipe of texts is built with, and the longest texts in tokens."""

    tokenizer: TextTokenizer
    source_length: int
    target_length: int


CLASSES, NUMBERS = "classes", "numbers"
LABELS = "labels"
"""The key of a `Recipe.model` whose head scores labels: their names, none of a number."""


def matmul_precision(model: Mapping[str, Any]) -> str | None:
    """Return how a Deployer is to multiply for a `Recipe.model`: float32 means all of float32.

    None, JAX's default, where its products are narrower or the model has no `dtype`.
    """
    return "highest" if model.get("dtype") == "float32" else None

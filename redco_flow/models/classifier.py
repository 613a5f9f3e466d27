"""A head of labels on a model of texts: what transformers calls `…ForSequenceClassification`.

Encoders score their first token's hidden state, after BERT's pooler or RoBERTa's layer of the same
kind; decoders their last token's. Parameters: those of the model without its own head, and
  classifier/{kernel (D, C), bias (C)}; of decoders without a bias
Dims in this file: B batch, T sequence, D model, C labels.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from redco_flow.engine.random import dropout, example_keys, fold_keys
from redco_flow.models.families.encoders import BertFamilyConfig
from redco_flow.models.families.family_config import FamilyConfig
from redco_flow.models.find import find_model
from redco_flow.models.hub import tensors
from redco_flow.models.hub.layouts import linear_layouts
from redco_flow.models.hub.tensors import TensorFiles
from redco_flow.models.projections import product, wide_product
from redco_flow.models.transformer.blocks import normal

logger = logging.getLogger(__name__)

Params = dict[str, Any]

_ARCHITECTURE = "ForSequenceClassification"
_OTHER_HEADS = ("ForMaskedLM", "LMHeadModel", "ForCausalLM")
_HEADS = ("pooler", "classifier")
# Heads of other kinds, which a published model may have instead.
_IGNORED = ("cls.*", "lm_head.*", "*pooler.*", "classifier.*", "score.*")
# Apart from the keys that the layers draw from an example's.
_DROPOUT = 7
_POOLED, _SCORED = range(2)


@dataclass(frozen=True)
class ClassifierConfig:
    """A model and the labels that it scores.

    Args:
        family: its family's name.
        inner: the model's own config; it has no head of its own.
        labels: names of the classes; none: the one output is a number.
    """

    family: str
    inner: FamilyConfig
    labels: tuple[str | int, ...]

    @classmethod
    def of(cls, family: str, config: FamilyConfig, labels: Sequence[str | int]) -> ClassifierConfig:
        """Return the config of a family's model with these labels in place of its own head."""
        is_encoder = isinstance(config, BertFamilyConfig)
        bare = {"has_head": False, "has_pooler": True} if is_encoder else {}
        # Tied, a decoder has no head but its embedding, which is not multiplied by here.
        bare = bare or {"tie_word_embeddings": True}
        return cls(family, config.updated(bare), tuple(labels))

    @property
    def module(self) -> Any:
        """The family's functions, of a `DecoderFamily` or an `EncoderFamily`."""
        return find_model(self.family)

    @property
    def is_encoder(self) -> bool:
        """Whether tokens attend to later ones, and the first token's state represents the text."""
        return isinstance(self.inner, BertFamilyConfig)

    @property
    def num_outputs(self) -> int:
        """C."""
        return len(self.labels) or 1

    @property
    def max_length(self) -> float:
        """Tokens of the longest text that learned positions reach; without them infinity."""
        core: Any = self.inner.core
        longest: float = (core.stack if self.is_encoder else core).max_length
        return longest

    @property
    def num_token_types(self) -> int:
        """The number of token types that an encoder distinguishes."""
        return getattr(self.inner, "type_vocab_size", 1)

    def architectures(self) -> tuple[str, ...]:
        """Return what transformers calls the class."""
        if self.inner.classifier_architecture:
            return (self.inner.classifier_architecture,)
        name = self.inner.architecture
        for head in _OTHER_HEADS:
            name = name.removesuffix(head)
        return (f"{name}{_ARCHITECTURE}",)

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the `config.json` that transformers reads as this same model."""
        names = list(map(str, self.labels)) or ["LABEL_0"]
        return {
            **self.inner.to_hugging_face(),
            "architectures": list(self.architectures()),
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
            "pad_token_id": self.inner.filler_token_id,
            "problem_type": "single_label_classification" if self.labels else "regression",
        }

    def tensor_layouts(self) -> dict[str, Any]:
        """Return a tree like the parameters that says which tensors each is made of."""
        layouts = dict(self.inner.tensor_layouts())
        if not self.is_encoder:
            scorer = linear_layouts("score", "model", "labels")
            return {**layouts, "classifier": {"kernel": scorer["kernel"]}}
        assert isinstance(self.inner, BertFamilyConfig)
        pooler, classifier = self.inner.classifier_names
        if pooler is not None:
            layouts["pooler"] = linear_layouts(pooler, "model", "labels")
        return {**layouts, "classifier": linear_layouts(classifier, "model", "labels")}


Config = ClassifierConfig


def init_params(config: ClassifierConfig, key: jax.Array) -> Params:
    """Draw float32 parameters; deviations are the family's."""
    inner_key, head_key = jax.random.split(key)
    core: Any = config.inner.core
    stack = core.stack if config.is_encoder else core
    width = stack.width if config.is_encoder else core.token_width
    kernel = normal(stack.init_stddev)(head_key, (width, config.num_outputs), jnp.float32)
    head = {"kernel": kernel}
    if config.is_encoder:
        head["bias"] = jnp.zeros(config.num_outputs)
    return {**config.module.init_params(config.inner, inner_key), "classifier": head}


def abstract_params(config: ClassifierConfig) -> Params:
    """Return the parameters' shapes and dtypes as `jax.ShapeDtypeStruct`s, allocating nothing."""
    shapes: Params = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    return shapes


def apply(
    config: ClassifierConfig,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    token_type_ids: jax.Array | None = None,
    rngs: jax.Array | None = None,
) -> jax.Array:
    """Return float32 scores (B, C).

    Args:
        input_ids, attention_mask: (B, T); mask 0 is padding, behind the text.
        token_type_ids: (B, T); which of two texts a token belongs to. None: all to the first.
        rngs: (B,) keys, one per example, for dropout; None: no dropout.
    """
    inner = {name: value for name, value in params.items() if name != "classifier"}
    head = params["classifier"]
    if config.is_encoder:
        pooled = _pool_first(config, inner, input_ids, attention_mask, token_type_ids, rngs)
    else:
        pooled = _pool_last(config, inner, input_ids, attention_mask, rngs)
    scores = wide_product(pooled, head["kernel"].astype(pooled.dtype))
    return scores + head["bias"] if "bias" in head else scores


def _pool_first(
    config: ClassifierConfig,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    token_type_ids: jax.Array | None,
    rngs: jax.Array | None,
) -> jax.Array:
    """Return what the pooler makes of the first token, (B, D)."""
    assert isinstance(config.inner, BertFamilyConfig)
    hidden = config.module.encode(
        config.inner, params, input_ids, attention_mask, token_type_ids, rngs
    )
    first = hidden[:, 0]
    keys = fold_keys(example_keys(rngs, len(input_ids)), _DROPOUT)
    rate = config.inner.head_dropout
    if config.inner.drops_before_pooler:
        first = dropout(first, rate, keys, _POOLED)
    kernel, bias = (params["pooler"][name].astype(first.dtype) for name in ("kernel", "bias"))
    return dropout(jnp.tanh(product(first, kernel) + bias), rate, keys, _SCORED)


def _pool_last(
    config: ClassifierConfig,
    params: Params,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    rngs: jax.Array | None,
) -> jax.Array:
    """Return the hidden state of each text's last token, (B, D)."""
    hidden, _, _ = config.module.apply_before_head(
        config.inner, params, input_ids, attention_mask, rngs=rngs
    )
    # A product, not a lookup, so that rows stay where they are when the sequence is sharded.
    is_last = jnp.arange(input_ids.shape[1]) == jnp.sum(attention_mask, axis=1)[:, None] - 1
    return jnp.sum(hidden * is_last[..., None].astype(hidden.dtype), axis=1)


def tensor_layouts(config: ClassifierConfig) -> dict[str, Any]:
    """Return a tree like the parameters that says what each is made of."""
    return config.tensor_layouts()


def load_params(config: ClassifierConfig, directory: Path, shardings: Any = None) -> Params:
    """Read a model's parameters, and draw those of the head that its files do not have.

    Args:
        directory: of a model in Hugging Face's format, with any head or none.
        shardings: tree of `jax.sharding.Sharding` like the parameters; None: the default device.

    Raises:
        CheckpointMismatch: other parameters are missing or of other shapes; all are named.
    """
    layouts, shapes = config.tensor_layouts(), abstract_params(config)
    new = drawn_parts(config, directory)
    read = [name for name in shapes if name not in new]

    def chosen(tree: Any, names: Sequence[str]) -> Any:
        return None if tree is None else {name: tree[name] for name in names}

    params: Params = tensors.load_params(
        directory,
        chosen(layouts, read),
        chosen(shapes, read),
        chosen(shardings, read),
        ignored=(*config.module.IGNORED_TENSORS, *_IGNORED),
    )
    if new:
        logger.info("%s: its files have no %s: initialized at random", directory, ", ".join(new))
        draw = jax.jit(
            lambda key: chosen(init_params(config, key), new), out_shardings=chosen(shardings, new)
        )
        params |= draw(jax.random.key(0))
    return {name: params[name] for name in shapes}


def head_parts(config: ClassifierConfig, directory: Path | None) -> tuple[str, ...]:
    """Return the parts of the parameters' tree that low-rank adaptation trains in full.

    That is what scores the labels, whether files have it or not, with all of transformers' module
    of that name, as PEFT does for a sequence classifier; and the pooler where it is drawn.

    Args:
        directory: of the model's files; None: all of it is drawn.
    """
    layouts = config.tensor_layouts()
    names = [name for name in _HEADS if name in layouts]
    drawn = names if directory is None else drawn_parts(config, directory)
    modules = {name: layouts[name]["kernel"].name.partition(".")[0] for name in names}
    return tuple(name for name in names if name in drawn or modules[name] == modules["classifier"])


def drawn_parts(config: ClassifierConfig, directory: Path) -> list[str]:
    """Return the parts of the head that a model's files do not have, so that they are drawn."""
    layouts, shapes = config.tensor_layouts(), abstract_params(config)
    with TensorFiles(directory) as files:
        return [
            name
            for name in _HEADS
            if name in shapes and not _has(files, layouts[name], shapes[name])
        ]


def _has(files: TensorFiles, layouts: Any, shapes: Any) -> bool:
    """Whether files have each tensor of a part of the head, in the wanted shape."""
    return all(
        any(
            name in files.names and files.shape(name) == layout.tensor_shape(shapes[key].shape)
            for name in layout.names(())
        )
        for key, layout in layouts.items()
    )


def published_labels(values: Mapping[str, Any]) -> list[str] | None:
    """Return the names of the classes that a `config.json` gives; None where it names none."""
    named = values.get("id2label")
    if not isinstance(named, Mapping):
        return None
    names = [str(named[key]) for key in sorted(named, key=int)]
    is_unnamed = names == [f"LABEL_{number}" for number in range(len(names))]
    return None if is_unnamed else names

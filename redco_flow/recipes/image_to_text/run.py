"""The functions of a model that says what an image shows.

Dims in this file: B batch, X image side, C channels, S states of the image, T target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.engine.step.chunked_loss import NumChunks, chunked_cross_entropy
from redco_flow.engine.step.loss import PerExample
from redco_flow.recipes.image_to_text.config import Settings, collate_fn
from redco_flow.recipes.parts.images import augment, check_images
from redco_flow.recipes.parts.model import (
    check_vocabulary,
    choose_sized_model,
    end_ids,
    make_pred_fn,
    sized_for,
    with_changes,
)
from redco_flow.recipes.recipe import Batch, Example, Generation, Recipe
from redco_flow.recipes.text_to_text.run import check_special_tokens, shift_targets
from redco_flow.text.pairs import encode_ending
from redco_flow.text.tokenizer import TextTokenizer


def build_captioner(
    model: Mapping[str, Any], tokenizer: TextTokenizer, settings: Settings
) -> Recipe:
    """Make the recipe; see `recipes.image_to_text.build`."""
    chosen = choose_sized_model(model, recipe="image_to_text", sizes=_sizes(tokenizer, settings))
    module, config = chosen.module, chosen.config
    check_vocabulary(chosen, tokenizer)
    check_special_tokens(config, tokenizer)
    check_images(config.encoder, settings)

    def make_captions(generation: Generation) -> Any:
        asked = replace(generation, max_length=generation.max_length or settings.max_length)
        generate = make_pred_fn(module, config, asked)

        def pred_fn(params: Any, batch: Mapping[str, jax.Array], rngs: jax.Array) -> jax.Array:
            return generate(params, _source(config, batch["images"]), rngs)

        return pred_fn

    def with_config(changes: Mapping[str, Any]) -> Recipe:
        return build_captioner(with_changes(model, changes), tokenizer, settings)

    return Recipe(
        model={**chosen.record, "settings": settings.model_dump(mode="json")},
        init_params=partial(module.init_params, config),
        abstract_params=partial(module.abstract_params, config),
        load_params=chosen.load_params,
        collate_fn=partial(collate, tokenizer=tokenizer, config=config, settings=settings),
        collate_prompts=partial(collate_fn, settings=settings),
        loss_fn=partial(_loss, module, config, settings, "auto"),
        loss_in_chunks=partial(partial, _loss, module, config, settings),
        make_pred_fn=make_captions,
        output_fn=partial(tokenizer.decode_until_end, end_ids=end_ids(chosen.record)),
        save_pretrained=chosen.save,
        with_config=with_config,
    )


def collate(
    examples: Sequence[Example], *, tokenizer: TextTokenizer, config: Any, settings: Settings
) -> Batch:
    """Return images (B, X, X, C), and decoder_input_ids and labels (B, T) of their captions.

    Raises:
        ValueError: as `config.collate_fn`.
    """
    captions = [example["caption"] for example in examples]
    encoded = encode_ending(captions, tokenizer, settings.max_length, [tokenizer.eos_id])
    targets = shift_targets(
        [np.array(row, np.int32) for row in encoded.ids],
        settings.max_length,
        pad_id=config.pad_token_id,
        start_id=config.decoder_start_token_id,
    )
    return {**collate_fn(examples, settings), **targets}


def _sizes(tokenizer: TextTokenizer, settings: Settings) -> dict[str, Any]:
    special_tokens = {"pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id}
    bos = {"bos_token_id": tokenizer.eos_id}
    images = {"image_size": settings.image_size, "num_channels": settings.num_channels}
    return {
        "encoder": images,
        "decoder": {**sized_for(tokenizer), **special_tokens, **bos},
        "decoder_start_token_id": tokenizer.pad_id,
        **special_tokens,
    }


def _source(config: Any, images: jax.Array) -> dict[str, jax.Array]:
    """Return what an encoder-decoder calls its source, without padding."""
    num_states = config.core.encoder.num_patches + 1
    return {
        "input_ids": images,
        "attention_mask": jnp.ones((images.shape[0], num_states), jnp.int32),
    }


def _loss(
    module: ModuleType,
    config: Any,
    settings: Settings,
    num_chunks: NumChunks,
    params: Any,
    batch: Mapping[str, jax.Array],
    rngs: jax.Array,
    is_training: bool,  # noqa: FBT001 (the engine's order of arguments)
    **of_training: Any,
) -> PerExample:
    """Summed cross-entropy, in training with these options, and number of a caption's tokens."""
    images = batch["images"]
    if is_training:
        images = augment(images, rngs, flip=settings.flip, shift=settings.shift)
    hidden, head, _ = module.apply_before_head(
        config,
        params,
        **_source(config, images),
        decoder_input_ids=batch["decoder_input_ids"],
        rngs=rngs if is_training else None,
    )
    return chunked_cross_entropy(
        partial(module.score, config),
        head,
        hidden,
        batch["labels"],
        num_chunks=num_chunks,
        **(of_training if is_training else {}),
    )

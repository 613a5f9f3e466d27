"""Tiny T5s of both kinds, and the same models in transformers/torch as the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from redco_flow.models import t5
from redco_flow.models.pretrained import save_pretrained

VERSIONS = {
    "v1.0": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
# No two sizes are equal, so that no swapped dim goes unseen.
SIZES = {
    "vocab_size": 61,
    "d_model": 16,
    "d_kv": 6,
    "d_ff": 40,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
MakeParams = Callable[..., t5.Params]
MakeBatch = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(params=list(VERSIONS))
def config(request: pytest.FixtureRequest) -> t5.Config:
    """Both versions; `@pytest.mark.parametrize("config", ["v1.1"], indirect=True)` picks one."""
    return t5.Config(**SIZES, **VERSIONS[request.param])


@pytest.fixture
def make_params() -> MakeParams:
    """Draw parameters of which every one is random: norms of ones would hide a mix-up."""

    def make(config: t5.Config, seed: int = 0) -> t5.Params:
        rng = np.random.default_rng(seed)
        return jax.tree.map(
            lambda leaf: leaf * (1 + 0.3 * rng.standard_normal(leaf.shape).astype(np.float32)),
            t5.init_params(config, jax.random.key(seed)),
        )

    return make


@pytest.fixture
def params(config: t5.Config, make_params: MakeParams) -> t5.Params:
    return make_params(config)


@pytest.fixture
def make_batch() -> MakeBatch:
    """Draw rows of the given lengths, padded at the end; labels are -100 there."""

    def make(
        source_lengths: tuple[int, ...], target_lengths: tuple[int, ...], seed: int = 1
    ) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        source_mask = np.arange(max(source_lengths)) < np.array(source_lengths)[:, None]
        target_mask = np.arange(max(target_lengths)) < np.array(target_lengths)[:, None]
        labels = np.where(target_mask, rng.integers(2, 61, target_mask.shape), -100)
        shifted = np.pad(labels, ((0, 0), (1, 0)))[:, :-1]
        return {
            "input_ids": np.where(source_mask, rng.integers(2, 61, source_mask.shape), 0),
            "attention_mask": source_mask.astype(np.int32),
            "decoder_input_ids": np.where(shifted == -100, 0, shifted),
            "labels": labels,
        }

    return make


@pytest.fixture
def batch(make_batch: MakeBatch) -> dict[str, np.ndarray]:
    return make_batch(source_lengths=(11, 4, 7), target_lengths=(6, 9, 3))


@pytest.fixture
def torch_model(tmp_path: Path) -> Callable[[t5.Config, t5.Params], Any]:
    """Give transformers' model of the same weights, which reach it through exported files."""
    pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    def load(config: t5.Config, params: t5.Params) -> Any:
        save_pretrained(tmp_path / "torch", t5, config, params)
        return transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "torch").eval()

    return load

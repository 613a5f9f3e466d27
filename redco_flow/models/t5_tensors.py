"""Which Hugging Face tensors T5's parameters are made of.

Names as transformers' T5ForConditionalGeneration has them; torch keeps kernels as (out, in).
"""

from __future__ import annotations

from typing import Any

from redco_flow.models.t5_config import T5Config
from redco_flow.models.tensor_files import TensorFiles, equal_tensors
from redco_flow.models.tensor_layout import TensorLayout

_HEAD = "lm_head.weight"
_EMBEDDING = "shared.weight"
# The first published T5s have this one, and no T5 uses it.
IGNORED_TENSORS = (
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    _HEAD,
)


def tensor_layouts(config: T5Config) -> dict[str, Any]:
    """Return a tree like the parameters that says what each is made of."""
    layouts: dict[str, Any] = {
        "embedding": TensorLayout(
            "vocabulary model",
            "vocabulary model",
            _EMBEDDING,
            aliases=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        ),
        "encoder": _stack("encoder", config, {"self_attention": 0, "feed_forward": 1}),
        "decoder": _stack(
            "decoder", config, {"self_attention": 0, "cross_attention": 1, "feed_forward": 2}
        ),
    }
    if not config.tie_word_embeddings:
        layouts["lm_head"] = TensorLayout("model vocabulary", "vocabulary model", _HEAD)
    return layouts


def config_of_tensors(config: T5Config, files: TensorFiles) -> T5Config:
    """Return `config`, untied where the checkpoint has a head that is not the embedding.

    transformers 5 writes `tie_word_embeddings: true` for every T5, v1.1 too, and goes by the
    tensors when it reads; so must we.
    """
    if not config.tie_word_embeddings or not {_HEAD, _EMBEDDING} <= files.names:
        return config
    if equal_tensors(files, _HEAD, _EMBEDDING):
        return config
    return config.updated(
        {"tie_word_embeddings": False, "scale_decoder_outputs": config.scale_decoder_outputs}
    )


def _stack(name: str, config: T5Config, sublayers: dict[str, int]) -> dict[str, Any]:
    blocks = f"{name}.block.{{layer}}.layer"
    build = {
        "self_attention": _self_attention,
        "cross_attention": _cross_attention,
        "feed_forward": _gated if config.is_gated else _ungated,
    }
    layers = {
        part: {
            "norm": TensorLayout("layer model", "model", f"{blocks}.{place}.layer_norm.weight"),
            **build[part](f"{blocks}.{place}"),
        }
        for part, place in sublayers.items()
    }
    return {
        "layers": layers,
        "final_norm": TensorLayout("model", "model", f"{name}.final_layer_norm.weight"),
        "relative_bias": TensorLayout(
            "buckets heads",
            "buckets heads",
            f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        ),
    }


def _self_attention(prefix: str) -> dict[str, TensorLayout]:
    name = f"{prefix}.SelfAttention"
    return {
        "qkv": TensorLayout(
            "layer model part heads head_dim",
            "(heads head_dim) model",
            f"{name}.{{part}}.weight",
            {"part": ("q", "k", "v")},
        ),
        "out": _attention_out(name),
    }


def _cross_attention(prefix: str) -> dict[str, TensorLayout]:
    name = f"{prefix}.EncDecAttention"
    return {
        "q": TensorLayout(
            "layer model heads head_dim", "(heads head_dim) model", f"{name}.q.weight"
        ),
        "kv": TensorLayout(
            "layer model part heads head_dim",
            "(heads head_dim) model",
            f"{name}.{{part}}.weight",
            {"part": ("k", "v")},
        ),
        "out": _attention_out(name),
    }


def _attention_out(name: str) -> TensorLayout:
    return TensorLayout("layer heads head_dim model", "model (heads head_dim)", f"{name}.o.weight")


def _gated(prefix: str) -> dict[str, TensorLayout]:
    name = f"{prefix}.DenseReluDense"
    return {
        "wi": TensorLayout("layer model gate units", "units model", f"{name}.wi_{{gate}}.weight"),
        "wo": TensorLayout("layer units model", "model units", f"{name}.wo.weight"),
    }


def _ungated(prefix: str) -> dict[str, TensorLayout]:
    name = f"{prefix}.DenseReluDense"
    return {
        "wi": TensorLayout(
            "layer model gate units", "units model", f"{name}.{{gate}}.weight", {"gate": ("wi",)}
        ),
        "wo": TensorLayout("layer units model", "model units", f"{name}.wo.weight"),
    }

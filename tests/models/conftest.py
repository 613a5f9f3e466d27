"""Tiny models of every family, and the same in transformers/torch as the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from redco_flow.models.find import find_model
from redco_flow.models.hub.pretrained import save_pretrained
from tests.drawn_params import as_array

t5 = find_model("t5")

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
MakeParams = Callable[..., dict[str, Any]]
MakeBatch = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(params=list(VERSIONS))
def config(request: pytest.FixtureRequest) -> t5.Config:
    """Both versions; `@pytest.mark.parametrize("config", ["v1.1"], indirect=True)` picks one."""
    return t5.Config(**SIZES, **VERSIONS[request.param])


@pytest.fixture
def make_params() -> MakeParams:
    """Draw parameters of which every one is random: norms of ones would hide a mix-up."""

    def make(config: t5.Config, seed: int = 0) -> dict[str, Any]:
        rng = np.random.default_rng(seed)

        def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            noise = rng.standard_normal(leaf.shape)
            if path[-1].key == "scale":
                return as_array(1 + 0.3 * noise)
            return as_array((1 if path[-1].key == "embedding" else 0.2) * noise)

        return jax.tree_util.tree_map_with_path(draw, t5.abstract_params(config))

    return make


@pytest.fixture
def params(config: t5.Config, make_params: MakeParams) -> dict[str, Any]:
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
def torch_model(tmp_path: Path) -> Callable[[t5.Config, dict[str, Any]], Any]:
    """Give transformers' model of the same weights, which reach it through exported files."""
    pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    def load(config: t5.Config, params: dict[str, Any]) -> Any:
        save_pretrained(tmp_path / "torch", t5, config, params)
        return transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "torch").eval()

    return load


_GPT = {"vocab_size": 61, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_inner": 40,
        "n_positions": 48, "bos_token_id": 2, "eos_token_id": 1}  # fmt: skip
_OPT = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
        "ffn_dim": 40, "max_position_embeddings": 48}  # fmt: skip
_LLAMA = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 48,
          "bos_token_id": 2, "eos_token_id": 1}  # fmt: skip
_LLAMA3_SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                   "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
_DEEPSEEK = {**_LLAMA, "num_key_value_heads": 4, "q_lora_rank": 14, "kv_lora_rank": 10,
             "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
             "first_k_dense_replace": 1, "moe_intermediate_size": 20, "n_routed_experts": 6,
             "n_group": 3, "topk_group": 2, "num_experts_per_tok": 2,
             "rms_norm_eps": 1e-3}  # fmt: skip
# Each family, and what published models of it do differently; windows are shorter than rows.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 4}),
    "opt": ("opt", _OPT),
    "opt-350m": ("opt", {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "llama": ("llama", {**_LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biased": (
        "llama", {**_LLAMA, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}
    ),
    "llama-linear": ("llama", {**_LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama3": ("llama", {**_LLAMA, "head_dim": 12, "rope_scaling": _LLAMA3_SCALING}),
    "mistral": ("mistral", {**_LLAMA, "sliding_window": 4}),
    "qwen2": (
        "qwen2",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**_LLAMA, "head_dim": 12}),
    "qwen3_moe": (
        "qwen3_moe",
        {**_LLAMA, "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2,
         "moe_intermediate_size": 20},
    ),
    "olmo2": ("olmo2", {**_LLAMA, "num_key_value_heads": 4}),
    "olmo2-grouped": ("olmo2", _LLAMA),
    "phi3": ("phi3", {**_LLAMA, "num_key_value_heads": 4, "pad_token_id": 0, "sliding_window": 4}),
    "phi3-long": (
        "phi3",
        {**_LLAMA, "pad_token_id": 0, "head_dim": 8, "partial_rotary_factor": 0.75,
         "original_max_position_embeddings": 24,
         "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5, 2.0],
                          "long_factor": [1.0, 3.0, 9.0]}},
    ),
    "smollm3": (
        "smollm3",
        {**_LLAMA, "pad_token_id": 0, "no_rope_layer_interval": 2, "use_sliding_window": True,
         "sliding_window": 4},
    ),
    "gemma3_text": (
        "gemma3_text",
        {**_LLAMA, "head_dim": 12, "sliding_window": 4, "sliding_window_pattern": 2,
         "rope_theta": 500.0, "rope_local_base_freq": 50.0, "query_pre_attn_scalar": 20,
         "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "gemma2": (
        "gemma2",
        {**_LLAMA, "head_dim": 12, "sliding_window": 4, "query_pre_attn_scalar": 20,
         "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    ),
    "gpt_oss": (
        "gpt_oss",
        {**_LLAMA, "head_dim": 12, "sliding_window": 4, "num_local_experts": 4,
         "num_experts_per_tok": 2, "swiglu_limit": 0.2,
         "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False,
                          "original_max_position_embeddings": 16}},
    ),
    "mixtral": ("mixtral", {**_LLAMA, "num_local_experts": 4}),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {**_DEEPSEEK, "q_lora_rank": None, "norm_topk_prob": False, "rope_interleave": False,
         "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7,
                          "original_max_position_embeddings": 16}},
    ),
}  # fmt: skip


_BERT = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
         "intermediate_size": 40, "max_position_embeddings": 20, "type_vocab_size": 3}  # fmt: skip
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", _BERT),
    "roberta": ("roberta", {**_BERT, "hidden_act": "relu"}),
    "bert-headless": ("bert", {**_BERT, "has_head": False, "has_pooler": True}),
    "roberta-headless": ("roberta", {**_BERT, "has_head": False, "has_pooler": True}),
    "bert-pooled": ("bert", {**_BERT, "has_pooler": True}),
}
_VIT = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 40, "image_size": 12, "patch_size": 4, "num_channels": 2,
        "num_labels": 5}  # fmt: skip
IMAGE_ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit", _VIT),
    "vit-pooled": (
        "vit", {**_VIT, "qkv_bias": False, "has_classifier": False, "has_pooler": True}
    ),
}  # fmt: skip
_CAPTIONER = {
    "encoder": {**_VIT, "model_type": "vit", "has_classifier": False},
    "decoder": {**_GPT, "model_type": "gpt2", "add_cross_attention": True, "is_decoder": True},
    "decoder_start_token_id": 3, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
CAPTIONERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vision_encoder_decoder": ("vision_encoder_decoder", _CAPTIONER),
    # Of another width than the decoder, to which it is projected.
    "vision_encoder_decoder-projected": (
        "vision_encoder_decoder",
        {**_CAPTIONER, "encoder": {**_CAPTIONER["encoder"], "hidden_size": 16}},
    ),
}
# No two sizes are equal, so that no swapped dim goes unseen.
_BART = {"vocab_size": 61, "d_model": 24, "encoder_layers": 3, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 6, "encoder_ffn_dim": 40,
         "decoder_ffn_dim": 36, "max_position_embeddings": 20}  # fmt: skip
BARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("bart", _BART),
    "bart-scaled": (
        "bart",
        {**_BART, "scale_embedding": True, "activation_function": "relu", "forced_bos_token_id": 0},
    ),
}


class ModelCase(NamedTuple):
    """A family, one of its configs, and parameters."""

    module: ModuleType
    config: Any
    params: Any

    def changed(self, seed: int = 0, **values: Any) -> ModelCase:
        """The same with another config and parameters of its own."""
        config = self.config.updated(values)
        return ModelCase(self.module, config, random_params(self.module, config, seed))

    def jitted(self, function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
        """Compile `function(module, config, ...)` once for all tests of this config.

        Keywords are static: the same values give the same jitted function.
        """
        return _jitted(function, self.module, self.config, tuple(sorted(static.items())))

    def apply(self, *inputs: Any, **named: Any) -> jax.Array:
        """Return the logits of these parameters, compiled once for inputs of these shapes."""
        return self.jitted(apply)(self.params, *inputs, **named)


@cache
def _jitted(function: Any, module: Any, config: Any, static: tuple[Any, ...]) -> Any:
    return jax.jit(partial(function, module, config, **dict(static)))


def apply(module: Any, config: Any, *inputs: Any, **named: Any) -> jax.Array:
    return module.apply(config, *inputs, **named)


def random_params(module: ModuleType, config: Any, seed: int = 0) -> Any:
    """Draw parameters of which every one is random, biases and norms too.

    Three times the usual stddev: attention then prefers some tokens to others. With NumPy: to
    compile a model's own initialisation takes a second.
    """
    rng = np.random.default_rng(seed)
    # Gemma adds 1 to its scales.
    family = getattr(config, "inner", config).model_type
    scale = 0.0 if family.startswith("gemma") else 1.0

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name, noise = path[-1].key, rng.standard_normal(leaf.shape)
        if name == "scale" or name.endswith("bias"):
            return as_array((scale if name == "scale" else 0.0) + 0.3 * noise)
        return as_array(0.06 * noise)

    return jax.tree_util.tree_map_with_path(draw, module.abstract_params(config))


# Those that between them have nearly every part; the others are `slow`.
_USUAL = ("gpt2", "llama3", "gemma2")


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in _USUAL else pytest.mark.slow) for name in DECODERS
    ]
)
def decoder(request: pytest.FixtureRequest) -> ModelCase:
    """Every family; `parametrize("decoder", ["gpt2"], indirect=True)` picks one."""
    return make_case(*DECODERS[request.param])


@pytest.fixture(params=["bert", "roberta"])
def encoder(request: pytest.FixtureRequest) -> ModelCase:
    """Every family, or one of ENCODERS that is asked for."""
    return make_case(*ENCODERS[request.param])


@pytest.fixture(params=list(IMAGE_ENCODERS))
def image_encoder(request: pytest.FixtureRequest) -> ModelCase:
    return make_case(*IMAGE_ENCODERS[request.param])


@pytest.fixture(params=list(CAPTIONERS))
def captioner(request: pytest.FixtureRequest) -> ModelCase:
    return make_case(*CAPTIONERS[request.param])


@pytest.fixture(params=list(BARTS))
def bart(request: pytest.FixtureRequest) -> ModelCase:
    return make_case(*BARTS[request.param])


def make_case(family: str, values: dict[str, Any]) -> ModelCase:
    module = find_model(family)
    config = module.Config.from_hugging_face(values)
    return ModelCase(module, config, random_params(module, config))


@pytest.fixture
def padded_batch() -> dict[str, np.ndarray]:
    """Rows of 11 tokens: padded in front, padded behind, and full."""
    rng = np.random.default_rng(1)
    mask = np.ones((3, 11), np.int32)
    mask[0, :4] = 0
    mask[1, 8:] = 0
    return {
        "input_ids": rng.integers(2, 61, mask.shape),
        "attention_mask": mask,
        # What `generate` and training code of transformers give, and forward() does not.
        "position_ids": np.maximum(np.cumsum(mask, axis=1) - 1, 0),
    }


@pytest.fixture
def torch_reference(tmp_path: Path) -> Callable[[ModelCase], Any]:
    """Give transformers' model of the same weights, which reach it through exported files."""
    pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    def load(case: ModelCase) -> Any:
        save_pretrained(tmp_path / "torch", *case)
        (architecture,) = case.config.architectures()
        return (
            getattr(transformers, architecture)
            .from_pretrained(tmp_path / "torch", attn_implementation="eager")
            .eval()
        )

    return load


@pytest.fixture
def assert_same_gradients() -> Callable[..., None]:
    """Compare the gradients of every parameter with those that torch has computed."""

    def compare(case: ModelCase, loss: Callable[[Any], jax.Array], reference: Any) -> None:
        expected = {name: p.grad.numpy() for name, p in reference.named_parameters()}
        layouts = jax.tree.leaves(case.module.tensor_layouts(case.config))
        leaves = jax.tree.leaves(jax.jit(jax.grad(loss))(case.params))
        found = {
            name: tensor
            for layout, leaf in zip(layouts, leaves, strict=True)
            for name, tensor in layout.split(np.asarray(leaf))
        }
        for name in found.keys() - expected.keys():
            # What torch does not train.
            np.testing.assert_array_equal(found.pop(name), 0, err_msg=name)
        assert found.keys() == expected.keys()
        # The largest of all: a bias of keys shifts every score alike, and has no gradient at all.
        largest = max(np.abs(tensor).max() for tensor in expected.values())
        for name, tensor in found.items():
            scale = max(np.abs(expected[name]).max(), 1e-3 * largest)
            tolerance = 1e-5 * scale
            np.testing.assert_allclose(tensor, expected[name], rtol=0, atol=tolerance, err_msg=name)

    return compare

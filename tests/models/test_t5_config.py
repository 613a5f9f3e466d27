from __future__ import annotations

import json

import pytest

from redco_flow.models.families.t5 import T5Config

# The shape-giving part of the published config.json files.
T5_SMALL = {
    "architectures": ["T5WithLMHeadModel"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1,
    "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06,
    "model_type": "t5", "n_positions": 512, "num_heads": 8, "num_layers": 6,
    "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32,
    "vocab_size": 32128,
}  # fmt: skip
FLAN_T5_SMALL = {
    **T5_SMALL, "d_ff": 1024, "feed_forward_proj": "gated-gelu", "num_decoder_layers": 8,
    "num_heads": 6, "num_layers": 8, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_published_v1_0_config_is_tied_scaled_and_relu():
    config = T5Config.from_hugging_face(T5_SMALL)

    assert (config.tie_word_embeddings, config.scale_decoder_outputs) == (True, True)
    assert (config.activation, config.is_gated) == ("relu", False)
    assert config.num_decoder_layers == 6


def test_a_published_v1_1_config_is_untied_unscaled_and_gated():
    config = T5Config.from_hugging_face(FLAN_T5_SMALL, dtype="bfloat16")

    assert (config.tie_word_embeddings, config.scale_decoder_outputs) == (False, False)
    assert (config.activation, config.is_gated) == ("gelu_new", True)
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize("values", [T5_SMALL, FLAN_T5_SMALL])
def test_an_exported_config_reads_back_as_the_same(values):
    config = T5Config.from_hugging_face(values)

    exported = json.loads(json.dumps(config.to_hugging_face()))

    assert T5Config.from_hugging_face(exported) == config


@pytest.mark.parametrize("values", [T5_SMALL, FLAN_T5_SMALL])
def test_transformers_reads_an_exported_config_as_the_same_model(values):
    import transformers

    theirs = transformers.T5Config(**T5Config.from_hugging_face(values).to_hugging_face())

    expected = transformers.T5Config(**values)
    derived = ("num_decoder_layers", "scale_decoder_outputs", "dense_act_fn", "is_gated_act")
    for key in ("d_ff", "d_kv", "d_model", "num_heads", "num_layers", "vocab_size", *derived):
        assert getattr(theirs, key) == getattr(expected, key), key


def test_an_unknown_key_is_refused_with_the_nearest_known():
    with pytest.raises(ValueError, match=r"no key 'num_layer'; did you mean 'num_layers'\?"):
        T5Config().updated({"num_layer": 3})


def test_fields_that_follow_others_follow_the_new_ones():
    config = T5Config().updated({"num_layers": 2, "tie_word_embeddings": False})

    assert config.num_decoder_layers == 2
    assert config.scale_decoder_outputs is False


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"d_model": 0}, "d_model is 0"),
        ({"num_heads": 2.0}, "num_heads is 2.0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"eos_token_id": 40_000}, r"eos_token_id is 40000; it must be in \[0, 32128\)"),
        ({"dropout_rate": 1.0}, "dropout_rate is 1.0"),
        ({"feed_forward_proj": "tanh"}, "feed_forward_proj is 'tanh'"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
    ],
)
def test_a_value_that_no_t5_can_have_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        T5Config(**values)


def test_another_model_type_is_refused():
    with pytest.raises(ValueError, match="model_type 'bart'"):
        T5Config.from_hugging_face({"model_type": "bart"})

from __future__ import annotations

import copy
import dataclasses
import itertools
import json

import pytest

from redco_flow.models.attention.rope import RopeScaling
from redco_flow.models.find import FAMILIES, find_model
from tests.models.conftest import BARTS, CAPTIONERS, DECODERS, ENCODERS, IMAGE_ENCODERS, SIZES

bart = find_model("bart")
bert = find_model("bert")
gemma2 = find_model("gemma2")
gpt2 = find_model("gpt2")
llama = find_model("llama")
mistral = find_model("mistral")
qwen2 = find_model("qwen2")
roberta = find_model("roberta")

CASES = {
    **DECODERS, **ENCODERS, **BARTS, **CAPTIONERS, **IMAGE_ENCODERS, "t5": ("t5", SIZES),
}  # fmt: skip

MODULES = [find_model(name) for name in FAMILIES if name != "vision_encoder_decoder"]
# The shape-giving part of published config.json files.
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}  # fmt: skip
MISTRAL_7B_V02 = {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32000,
}  # fmt: skip


def test_a_published_llama_3_1_has_groups_scaled_positions_and_three_end_tokens():
    config = llama.Config.from_hugging_face(LLAMA_3_1_8B, dtype="bfloat16")

    assert config.eos_token_ids == (128001, 128008, 128009)
    assert (config.head_dim, config.num_key_value_heads, config.rope_theta) == (128, 8, 500_000.0)
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert config.dtype == "bfloat16"


def test_rope_parameters_say_the_same_as_rope_theta_and_rope_scaling():
    values = dict(LLAMA_3_1_8B)
    parameters = {**values.pop("rope_scaling"), "rope_theta": values.pop("rope_theta")}

    found = llama.Config.from_hugging_face({**values, "rope_parameters": parameters})

    assert found == llama.Config.from_hugging_face(LLAMA_3_1_8B)


def test_null_where_a_window_could_be_means_no_window():
    config = mistral.Config.from_hugging_face(MISTRAL_7B_V02)

    assert set(config.core.windows) == {None}
    assert set(mistral.Config().core.windows) == {4096}


def test_qwens_slide_from_a_layer_on_and_gemmas_in_every_second():
    qwen = qwen2.Config(
        num_hidden_layers=4, use_sliding_window=True, sliding_window=9, max_window_layers=3
    )
    gemma = gemma2.Config(num_hidden_layers=4, sliding_window=9)

    assert qwen.core.windows == (None, None, None, 9)
    assert gemma.core.windows == (9, None, 9, None)


@pytest.mark.parametrize("module", MODULES)
def test_an_exported_config_reads_back_as_the_same(module):
    config = module.Config()

    exported = json.loads(json.dumps(config.to_hugging_face()))

    assert module.Config.from_hugging_face(exported) == config
    assert hash(config) == hash(module.Config())


@pytest.mark.parametrize("module", MODULES)
def test_the_defaults_are_those_of_transformers(module):
    import transformers

    theirs = getattr(transformers, type(module.Config()).__name__)().to_dict()

    assert module.Config.from_hugging_face(theirs) == module.Config()


def test_fields_that_follow_others_follow_the_new_ones():
    shrunk = llama.Config().updated({"hidden_size": 64, "num_attention_heads": 4})
    kept = llama.Config(num_key_value_heads=8).updated({"num_attention_heads": 16})

    assert (shrunk.head_dim, shrunk.num_key_value_heads) == (16, 4)
    assert kept.num_key_value_heads == 8
    assert gpt2.Config().updated({"n_embd": 96}).n_inner == 384
    assert len(gemma2.Config().updated({"num_hidden_layers": 3}).layer_types) == 3


def test_rope_scaling_may_be_given_as_a_mapping():
    scaling = {"rope_type": "linear", "factor": 2.0}

    config = llama.Config().updated({"rope_scaling": scaling})

    assert config.rope_scaling == RopeScaling("linear", 2.0)


def test_an_unknown_key_is_refused_with_the_nearest_known():
    with pytest.raises(ValueError, match=r"no key 'hidden_sizes'; did you mean 'hidden_size'\?"):
        llama.Config().updated({"hidden_sizes": 3})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; it must be a positive whole number"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a number"),
        ({"attention_dropout": 1.0}, r"attention_dropout is 1\.0; it must be in \[0, 1\)"),
        ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
        ({"eos_token_id": (2, 40_000)}, r"eos_token_id is 40000; it must be in \[0, 32000\)"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5; it must divide hidden_size, 4096"),
        ({"num_key_value_heads": 5}, "there are 5 key-value heads; they must divide the 32"),
        ({"hidden_act": "mish"}, "activation 'mish' is not known; it must be one of relu"),
        ({"dtype": "float16"}, "dtype is 'float16'; it must be one of float32, bfloat16"),
        ({"remat": "some"}, "remat is 'some'; it must be one of none, full, dots, minimal, auto"),
        (
            {"remat": "auto", "activations": {"qkv": "keep"}},
            "which remat auto decides: leave it out",
        ),
        ({"activations": "keep"}, "activations is 'keep'; it must be a mapping by name; known"),
        (
            {"remat": "full", "activations": {"mlp_inn": "keep"}},
            "activations has no name 'mlp_inn'; did you mean 'mlp_in'.* known names: layer_input, ",
        ),
        (
            {"remat": "full", "activations": {"qkv": "host"}},
            "activations has qkv 'host'; it must be one of keep, recompute, offload, split",
        ),
        ({"remat": "full", "activations": {"layer_input": "recompute"}}, "keep or offload it"),
        (
            {"remat": "full", "activations": {"qkv": "split"}},
            "qkv 'split'; .* What can be split: layer_input, attention_out, mlp_input, mlp_out",
        ),
        (
            {"remat": "full", "activations": {"qkv": "offload", "offload_share": 0}},
            "offload_share 0; it must be above 0 and at most 1",
        ),
        (
            {"remat": "full", "activations": {"qkv": "keep", "offload_share": 0.5}},
            "offload_share 0.5, and nothing is offloaded",
        ),
        ({"activations": {"qkv": "keep"}}, "remat none keeps all results: choose remat minimal"),
    ],
)
def test_a_value_that_no_llama_can_have_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        llama.Config(**values)


def test_layer_types_must_be_one_per_layer():
    with pytest.raises(ValueError, match="give 26, one per layer"):
        gemma2.Config(layer_types=("full_attention",))


def test_what_is_not_offered_is_refused_with_what_is():
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx True; gpt2 models"):
        gpt2.Config.from_hugging_face({"scale_attn_by_inverse_layer_idx": True})
    with pytest.raises(ValueError, match="rope_type 'dynamic'; it must be one of linear, llama3"):
        llama.Config.from_hugging_face({"rope_scaling": {"type": "dynamic", "factor": 2.0}})


def test_another_model_type_is_refused():
    with pytest.raises(ValueError, match="model_type 'phi'; this model reads 'llama'"):
        llama.Config.from_hugging_face({"model_type": "phi"})


def test_a_tied_model_cannot_be_untied_where_that_is_not_offered():
    with pytest.raises(ValueError, match="tie_word_embeddings is False; bert models are computed"):
        bert.Config(tie_word_embeddings=False)


def test_one_rate_of_dropout_is_that_of_all_places():
    config = bart.Config().updated({"dropout_rate": 0.25})

    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.25,) * 3
    for stack in (config.core.encoder, config.core.decoder):
        of_embeddings = (stack.embedding_dropout, stack.residual_dropout)
        assert {*of_embeddings, stack.attention.dropout, stack.mlp.dropout} == {0.25}
    assert config.core.decoder.cross_attention.dropout == 0.25


def test_a_text_that_is_too_long_ends_with_the_end_token_unless_another_is_given():
    follows = bart.Config().updated({"vocab_size": 100, "eos_token_id": 7})
    given = bart.Config(forced_eos_token_id=9).updated({"eos_token_id": 7})

    assert follows.forced_eos_token_id == 7
    assert given.forced_eos_token_id == 9


def test_positions_of_a_roberta_begin_after_its_padding_token():
    assert roberta.Config(max_position_embeddings=514).core.stack.max_length == 512
    with pytest.raises(ValueError, match="pad_token_id is None; positions begin after it"):
        roberta.Config(pad_token_id=None)


# Values of the wrong kind for nearly every key, as a config.json may have them.
WRONG = (
    5, -1, 1.5, "x", True, [], ["x"], [[1]], {}, {"rope_type": 5}, {"type": "yarn", "factor": {}},
    {"full_attention": 5}, float("nan"), 10**400, 1e308, 2**31, None,
)  # fmt: skip


def test_a_value_of_the_wrong_kind_is_an_error_that_names_its_key_and_never_another_error():
    """Each key of each family, in config.json and in model.config; right ones may be among them."""
    num_refused = 0
    for family, values in dict(CASES.values()).items():
        module = find_model(family)
        base = module.Config.from_hugging_face(values)
        keys = [field.name for field in dataclasses.fields(base)]
        for key, wrong in itertools.product([*keys, "rope_parameters"], WRONG):
            for read in (
                lambda: module.Config.from_hugging_face({**values, key: copy.deepcopy(wrong)}),  # noqa: B023
                lambda: base.updated({key: copy.deepcopy(wrong)}),  # noqa: B023
            ):
                try:
                    hash(read())
                except ValueError:
                    num_refused += 1

    assert num_refused > 5000

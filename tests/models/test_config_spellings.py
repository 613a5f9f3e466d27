"""Each way in which a config.json writes a model, read as transformers reads it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from redco_flow.models.find import find_model
from redco_flow.models.hub.pretrained import load_pretrained, read_model
from tests.models.conftest import BARTS, DECODERS, ENCODERS, SIZES

CASES = {**DECODERS, **ENCODERS, **BARTS, "t5": ("t5", SIZES)}
# What a tiny model cannot leave out: sizes that others must fit, ids within its vocabulary.
_SIZES = ("vocab_size", "hidden_size", "n_embd", "d_model", "first_k_dense_replace", "v_head_dim")
_ENDS = ("_heads", "n_head", "_token_id", "_group", "_experts")
_SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 24.0,
             "beta_slow": 2.0, "attention_factor": 1.3, "mscale": 1.0, "mscale_all_dim": 0.7,
             "truncate": False},
    "longrope": {"factor": 2.0, "original_max_position_embeddings": 24, "attention_factor": 1.2},
}  # fmt: skip
_ROPE_FAMILIES = {
    name: case
    for name, case in DECODERS.items()
    if hasattr(find_model(case[0]).Config, "rope_scaling") and "-" not in name
}


@pytest.mark.slow
def test_a_key_that_is_missing_is_what_transformers_takes_for_it():
    differing = []
    for name, (family, values) in CASES.items():
        left_out = [{k: v for k, v in values.items() if k != key} for key in _optional(values)]
        for one in [values, *left_out]:
            differing += _differences(name, family, one)

    assert not differing


def test_rotary_positions_are_read_as_transformers_reads_them_in_every_spelling():
    """The old and the new keys, each optional one left out, the length beside it or nowhere."""
    differing, num_read = [], 0
    for name in ("llama3", "qwen2", "phi3", "gemma3_text", "gpt_oss", "deepseek_v3"):
        family, values = _ROPE_FAMILIES[name]
        for one in _rope_spellings(family, values):
            differing += _differences(name, family, one)
            num_read += 1

    assert not differing
    assert num_read > 400


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "phi3", "mixtral", "gpt_oss", "deepseek_v3"])
def test_logits_are_those_of_transformers_where_optional_keys_are_missing(name, tmp_path):
    """A YaRN without its length: `max_position_embeddings`, as in Qwen2's first files."""
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    family, values = _ROPE_FAMILIES[name]
    scaling = {"rope_type": "yarn", "factor": 4.0}
    if family == "phi3":
        pairs = find_model(family).Config.from_hugging_face(values).head_dim // 2
        lists = {key: [1.5] * pairs for key in ("short_factor", "long_factor")}
        scaling = {"rope_type": "longrope", **lists}
    kept = {k: v for k, v in values.items() if not k.startswith(("rope", "max_pos", "num_key"))}
    if family == "mixtral":
        kept["head_dim"] = 8  # its YaRN in transformers does not derive it from the heads
    written = {**kept, "num_key_value_heads": values["num_key_value_heads"],
               "max_position_embeddings": 64, "rope_scaling": scaling}  # fmt: skip
    theirs = _torch_model(family, written, tmp_path)
    ids = np.random.default_rng(0).integers(3, 61, (2, 20))

    module, config = read_model(tmp_path)
    params = load_pretrained(tmp_path, module, config)
    found = jax.jit(partial(module.apply, config))(params, ids, np.ones_like(ids))

    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "yarn"}, "rope_type 'yarn' and no factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "no low_freq_factor, high_freq_factor"),
        ({"rope_type": "linear", "factor": [2.0]}, r"factor \(2.0,\); it must be a number above 0"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, "truncate 'no'; it must be true"),
        (5, "rope_scaling 5; it must be a mapping or null"),
        ([1], r"rope_scaling \[1\]; it must be a mapping or null"),
    ],
)
def test_a_scaling_that_transformers_cannot_compute_is_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        find_model("llama").Config.from_hugging_face({"rope_scaling": scaling})


def test_a_scaling_by_hand_without_a_length_takes_the_models():
    config = find_model("qwen2").Config(max_position_embeddings=64)

    found = config.updated({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    kept = found.updated({"max_position_embeddings": 256})

    assert found.rope_scaling.original_max_position_embeddings == 64
    assert kept.rope_scaling == found.rope_scaling


def test_zero_is_allowed_where_transformers_allows_it():
    """All layers slide; no layer is dense; no expert is shared."""
    qwen = find_model("qwen2").Config(
        num_hidden_layers=3, use_sliding_window=True, sliding_window=4, max_window_layers=0
    )
    deepseek = find_model("deepseek_v3").Config(first_k_dense_replace=0, n_shared_experts=0)

    assert qwen.core.windows == (4, 4, 4)
    assert deepseek.core.leading is None
    with pytest.raises(ValueError, match="max_window_layers is -1; it must be a whole number from"):
        qwen.updated({"max_window_layers": -1})


def _optional(values: dict[str, Any]) -> list[str]:
    return [key for key in values if key not in _SIZES and not key.endswith(_ENDS)]


def _rope_spellings(family: str, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    config = find_model(family).Config.from_hugging_face(values)
    lists = {key: [1.0 + i for i in range(config.head_dim // 2)] for key in ("short_factor",
             "long_factor")}  # fmt: skip
    base = {key: value for key, value in values.items() if not key.startswith("rope")}
    for rope_type, whole in _scalings(family).items():
        needed = lists if rope_type == "longrope" else {}
        for left_out in (None, *(key for key in whole if not _is_required(rope_type, key))):
            scaling = {**whole, **needed}
            scaling.pop(left_out, None)
            for outer in ({}, {"original_max_position_embeddings": 12}):
                yield from _written({**base, **outer}, rope_type, scaling, family)


def _scalings(family: str) -> dict[str, dict[str, Any]]:
    unread = {"phi3": ("linear", "llama3", "yarn"), "gpt_oss": ("default",)}.get(family, ())
    return {key: value for key, value in _SCALINGS.items() if key not in unread}


def _is_required(rope_type: str, key: str) -> bool:
    return key.endswith("_freq_factor") or (key == "factor" and rope_type != "longrope")


def _written(
    base: dict[str, Any], rope_type: str, scaling: dict[str, Any], family: str
) -> Iterator[dict[str, Any]]:
    new = {"rope_type": rope_type, "rope_theta": 777.0, **scaling}
    by_layer = {"full_attention": new, "sliding_attention": {"rope_theta": 55.0}}
    yield {**base, "rope_parameters": by_layer if family == "gemma3_text" else new}
    old = {"rope_type": rope_type, **scaling}
    yield {**base, "rope_theta": 777.0, "rope_scaling": old}
    yield {**base, "rope_scaling": old}
    if family != "gemma3_text":  # whose oldest files have rope_type; transformers reads it alone
        yield {**base, "rope_theta": 777.0, "rope_scaling": {"type": rope_type, **scaling}}
        yield {**base, "rope_scaling": old, "rope_parameters": {"rope_theta": 5.0}}


def _differences(name: str, family: str, values: dict[str, Any]) -> list[str]:
    """Compare with the same config as transformers completes it: all keys, in the new spelling."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    module = find_model(family)
    try:
        theirs = CONFIG_MAPPING[family].from_dict(copy.deepcopy(values))
    except (StrictDataclassError, TypeError):
        return []  # what transformers refuses has no expected reading
    if hasattr(theirs, "rope_parameters"):
        theirs.standardize_rope_params()  # as a model does when it is built
    completed = theirs.to_dict()
    if family != "phi3":  # it is in rope_parameters now
        completed.pop("original_max_position_embeddings", None)
    expected = module.Config.from_hugging_face(completed)
    found = module.Config.from_hugging_face(values)
    return [] if found.core == expected.core else [f"{name}: {values}: {found} {expected}"]


def _torch_model(family: str, values: dict[str, Any], folder: Path) -> Any:
    """Draw transformers' model, and save it with the config.json as it is written here."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[family].from_dict(copy.deepcopy(values))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**values, "model_type": family}))
    return model

"""Lengths beyond a model's positions are reported when the pipeline is planned."""

from __future__ import annotations

import json

import pytest

from redco_flow.errors import ConfigError
from redco_flow.spec.find import find_file
from redco_flow.spec.load import load_pipeline

TINY = {
    "bert": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 8, "max_position_embeddings": 64},
    "roberta": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
                "intermediate_size": 8, "max_position_embeddings": 66, "pad_token_id": 1},
    "gpt2": {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "bart": {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "max_position_embeddings": 64},
    "opt": {"hidden_size": 8, "ffn_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "max_position_embeddings": 64, "word_embed_proj_dim": 8},
    "t5": {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
    "llama": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
              "intermediate_size": 8, "max_position_embeddings": 64},
}  # fmt: skip
CASES = [
    ("classification", "bert", "max_source_length", 64),
    # transformers: a RoBERTa of 66 positions, of which 2 are for padding, reads 64 tokens.
    ("classification", "roberta", "max_source_length", 64),
    ("language_modeling", "gpt2", "max_source_length", 64),
    ("language_modeling", "gpt2", "max_target_length", 64),
    ("language_modeling", "opt", "max_target_length", 64),
    ("text_to_text", "bart", "max_source_length", 64),
    ("text_to_text", "bart", "max_target_length", 64),
    ("chat", "gpt2", "max_length", 64),
    ("text_to_text", "t5", "max_source_length", None),
    ("language_modeling", "llama", "max_source_length", None),
]


def mistakes(tmp_path, recipe, family, key, value, model):
    texts = "messages_key: m" if recipe == "chat" else "source_key: a, target_key: b"
    file = tmp_path / "pipeline.yaml"
    (tmp_path / "rows.csv").write_text("a,b\nx,y\n")
    row = {"m": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    data = tmp_path / ("rows.jsonl" if recipe == "chat" else "rows.csv")
    file.write_text(
        f"name: a\nrecipe: {recipe}\nmodel: {json.dumps(model)}\n"
        f"data: {{train: {data}, {texts}, tokenizer: {{train: {{}}}}}}\n"
        f"stages:\n  preprocess:\n    num_workers: 1\n    {key}: {value}\n  train: {{}}\n"
    )
    try:
        load_pipeline(file, looks_into_data=True)
    except ConfigError as error:
        return [(problem.line, problem.message) for problem in error.problems]
    return []


@pytest.mark.parametrize("place", ["in the pipeline", "in a folder"])
@pytest.mark.parametrize(("recipe", "family", "key", "longest"), CASES)
def test_texts_longer_than_the_positions_are_reported_at_their_key(
    tmp_path, recipe, family, key, longest, place
):
    model = {"family": family, "config": TINY[family]}
    if place == "in a folder":
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **TINY[family]}))
        model = {"name_or_path": str(tmp_path)}

    fits = mistakes(tmp_path, recipe, family, key, longest or 512, model)
    found = mistakes(tmp_path, recipe, family, key, (longest or 512) + 1, model)

    assert fits == []
    message = (
        f"'stages.preprocess.{key}': 65 tokens, and the model's positions ({family}) reach 64: "
        "lower it, or take a model with more"
    )
    assert found == ([(8, message)] if longest else [])


@pytest.mark.parametrize(
    ("recipe", "family", "key", "default"),
    [
        ("classification", "bert", "max_source_length", 512),
        ("text_to_text", "bart", "max_target_length", 128),
        ("chat", "gpt2", "max_length", 2048),
    ],
)
def test_default_lengths_beyond_the_positions_are_a_note(tmp_path, recipe, family, key, default):
    mistakes(tmp_path, recipe, family, "num_shards", 1, {"family": family, "config": TINY[family]})

    pipeline = load_pipeline(tmp_path / "pipeline.yaml", looks_into_data=True)

    (note,) = [note for note in pipeline.notes if key in note]
    assert note == (
        f"note: 'stages.preprocess.{key}': {default} tokens, and the model's positions ({family}) "
        "reach 64: lower it, or take a model with more; it is the default, and an error only "
        "where the data need it"
    )


def test_default_lengths_that_nothing_uses_are_not_compared(tmp_path):
    model = {"family": "bert", "config": TINY["bert"]}
    mistakes(tmp_path, "classification", "bert", "max_source_length", 64, model)

    assert load_pipeline(tmp_path / "pipeline.yaml", looks_into_data=True).notes == ()
    file = find_file("pipelines", "image_to_text")  # 32 positions, and rows as they are
    assert load_pipeline(file, looks_into_data=True).notes == ()

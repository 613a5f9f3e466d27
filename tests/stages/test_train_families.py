"""train and predict with a family that is not T5, and what a plan refuses of each of them."""

import pytest
from stage_kinds import predict, preprocess, train

from redco_flow.recipes.find import find_recipe
from redco_flow.spec.pipeline import ModelSection
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.artifacts.predictions import read_predictions

ROWS = [(f"{a} {b}", f"{b} {a}") for a in ("one", "two", "three") for b in ("four", "five", "six")]
TINY_BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.covers("stages by themselves", family="bart", recipe="text_to_text")
def test_a_bart_is_trained_with_dropout_and_predicts(bench, write_rows):
    path = write_rows(bench.root / "rows.jsonl", ROWS * 4)
    tokenizer = {"train": {"vocab_size": 280, "type": "bpe"}}
    data = {"train": str(path), "tokenizer": tokenizer, "test_fraction": 0.3}
    lengths = {"max_source_length": 8, "max_target_length": 8}
    dataset = bench.run(preprocess, {"data": data, **lengths})["dataset"]
    model = {"family": "bart", "config": TINY_BART}
    settings = {"model": model, "num_epochs": 1, "global_batch_size": 8, "dropout_rate": 0.1}

    checkpoint = bench.run(train, settings, {"dataset": [dataset]})["checkpoint/last"]
    inputs = {"dataset": [dataset], "checkpoint": [checkpoint]}
    predictions = bench.run(predict, {"num_beams": 2}, inputs)["predictions"]

    config = CheckpointArtifact(checkpoint.path).build_recipe().model["config"]
    assert (config["dropout"], config["attention_dropout"]) == (0.1, 0.1)
    # The tokenizer's own end token, not the family's usual one.
    assert config["forced_eos_token_id"] == config["eos_token_id"] == 1
    assert len(list(read_predictions(predictions.path))) > 0


@pytest.mark.parametrize("config", [{"vocab_size": 100}, {"dropout_rate": 0.3}])
@pytest.mark.parametrize(
    ("recipe", "family"),
    [
        (recipe, family)
        for recipe in ("text_to_text", "language_modeling")
        for family in find_recipe(recipe).families
    ],
)
def test_a_plan_takes_what_fits_the_family(recipe, family, config):
    """A small vocabulary too, which lacks the tokens that published models have."""
    model = ModelSection(family=family, config=config)

    assert train.Config(recipe=recipe, model=model).model == model


@pytest.mark.parametrize(
    ("recipe", "model", "message"),
    [
        (
            "text_to_text",
            {"family": "bart", "config": {"d_modle": 8}},
            "bart .* 'd_modle'; did you",
        ),
        (
            "language_modeling",
            {"family": "gpt2", "config": {"n_head": 7}},
            "7; it must divide n_em",
        ),
        (
            "language_modeling",
            {"family": "mixtral", "config": {"output_router_logits": "yes"}},
            "output_router_logits is 'yes'; it must be true or false",
        ),
        (
            "language_modeling",
            {"family": "llama", "config": {"output_router_logits": True}},
            "llama config has no key 'output_router_logits'",
        ),
        ("text_to_text", {"family": "bert"}, "trains t5, bart, and not 'bert'"),
        ("text_to_text", {"family": "bird"}, "no model family 'bird'; known: t5, bart"),
        ("text_to_text", {"family": "bird", "name_or_path": "a/b"}, "no model family 'bird'"),
    ],
)
def test_a_plan_refuses_what_no_model_of_the_family_has(recipe, model, message):
    with pytest.raises(ValueError, match=message):
        train.Config(recipe=recipe, model=ModelSection(**model))


def test_a_result_depends_on_the_code_of_its_family():
    def modules(**model):
        return train.code_modules(train.Config(model=ModelSection(**model)))

    assert "redco_flow.models.families.t5" in modules()
    assert "redco_flow.models.families.bart" in modules(family="bart")
    assert {"redco_flow.models.families.t5", "redco_flow.models.families.bart"} <= set(
        modules(name_or_path="a/b")
    )

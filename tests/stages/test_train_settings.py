"""Settings of a training that are checked, or read in several spellings, when it is planned."""

import pytest
from stage_kinds import train

from redco_flow.spec.load import settings_of
from redco_flow.spec.pipeline import ModelSection
from redco_flow.stages.train.sections import dropout_problem, targets_problem

TEXTS = {"recipe": "text_to_text", "model": {"family": "t5"}}
IMAGES = {"image_size": 4, "patch_size": 2}


def test_a_score_may_be_written_as_tables_call_it():
    shown = {"keep": {"best": ["val/rouge2"]}, "early_stopping": {"metric": "val/eval_loss"}}
    plain = {"keep": {"best": ["rouge2"]}, "early_stopping": {"metric": "eval_loss"}}

    found = settings_of(train.Config.from_json(TEXTS | shown))

    assert found == settings_of(train.Config.from_json(TEXTS | plain))
    with pytest.raises(ValueError, match="names a score twice"):
        train.Config.from_json(TEXTS | {"keep": {"best": ["rouge2", "val/rouge2"]}})


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("bert", ["classifier"]),
        ("bert", "classif"),
        ("llama", ["score"]),
        ("vit", ["classifier"]),
    ],
)
def test_targets_that_are_only_the_head_of_labels_are_refused(family, targets):
    """Its parameters are trained in full beside the factors, which are then none."""
    model = ModelSection(family=family, config=IMAGES if family == "vit" else {})

    problem = targets_problem(targets, family, model, has_labels=True)

    assert problem is not None
    assert "means only the head of labels, which is trained in full anyway" in problem


@pytest.mark.parametrize(
    ("family", "targets"), [("bert", ["query", "classifier"]), ("bert", "all-linear")]
)
def test_targets_may_name_the_head_of_labels_beside_others(family, targets):
    model = ModelSection(family=family)

    assert targets_problem(targets, family, model, has_labels=True) is None


@pytest.mark.parametrize(
    ("family", "targets", "chunks", "refused"),
    [
        ("llama", ["q_proj", "down_proj"], (4, "auto"), "layers/mlp/wo (num_mlp_chunks is 4)"),
        ("llama", ["q_proj", "lm_head"], (4, 2), "lm_head (num_loss_chunks is 2)"),
        ("llama", ".", ("auto", "auto"), None),
        ("llama", "all-linear", (None, 2), None),
        ("gpt2", "wte|attn", (None, 1), "embedding (rows are looked up)"),
        ("mixtral", "all-linear", (1, 1), "layers/experts/wi, layers/experts/wo (experts)"),
        ("gpt_oss", ["q_proj", "experts"], (1, 1), "layers/experts/wi, layers/experts/wo (ex"),
        ("mixtral", ["q_proj", "gate"], (1, 1), None),
        ("vit", "patches|query", (None, 1), "patches/kernel (a convolution)"),
        ("vit", "encoder|class", (None, 1), None),
        ("bart", "layers|bias", (None, 1), None),
        ("bert", ["query", "classifier"], (None, 1), None),
    ],
)
def test_dropout_is_refused_of_kernels_that_are_not_plainly_multiplied_with(
    family, targets, chunks, refused
):
    model = ModelSection(family=family, config=IMAGES if family == "vit" else {})
    has_labels = family in ("vit", "bert")

    problem = dropout_problem(targets, family, model, chunks, has_labels=has_labels)

    if refused is None:
        assert problem is None
    else:
        assert f"and cannot with {refused}" in problem

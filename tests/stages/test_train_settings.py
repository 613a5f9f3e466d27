"""Settings of a training that are checked, or read in several spellings, when it is planned."""

import pytest
from stage_kinds import train

from redco_flow.spec.load import settings_of
from redco_flow.spec.pipeline import ModelSection
from redco_flow.stages.train.sections import targets_problem

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

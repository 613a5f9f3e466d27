import copy

import pytest

from redco_flow.tracking.results import (
    ABSENT,
    Difference,
    differences,
    fingerprint,
)

INGREDIENTS = {
    "kind": "train",
    "settings": {"learning_rate": 1e-4, "schedule": {"type": "linear"}, "seed": 0},
    "inputs": {"dataset": ["a" * 64]},
    "data": {"train": "b" * 64},
    "code": {"redco_flow.stages.train.config": "c" * 64},
}


def _changed(*path: str, value: object) -> dict:
    ingredients = copy.deepcopy(INGREDIENTS)
    inner = ingredients
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return ingredients


def test_the_order_of_keys_does_not_matter():
    reordered = {key: INGREDIENTS[key] for key in reversed(INGREDIENTS)}

    assert fingerprint(reordered) == fingerprint(INGREDIENTS)
    assert not [*differences(INGREDIENTS, reordered)]
    assert len(fingerprint(INGREDIENTS)) == 64


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("kind",), "predict"),
        (("settings", "learning_rate"), 2e-4),
        (("settings", "schedule", "type"), "cosine"),
        (("data", "train"), "d" * 64),
        (("inputs", "dataset"), ["d" * 64]),
        (("code", "redco_flow.stages.train.config"), "d" * 64),
    ],
)
def test_every_ingredient_changes_the_fingerprint_and_is_named(path, value):
    changed = _changed(*path, value=value)

    assert fingerprint(changed) != fingerprint(INGREDIENTS)
    difference = next(differences(INGREDIENTS, changed))
    assert difference.key == ".".join(path)
    assert difference.new == value


def test_a_changed_setting_is_named_before_the_changed_input_that_follows_from_it():
    changed = _changed("inputs", "dataset", value=["d" * 64])
    changed["settings"]["learning_rate"] = 1.0
    changed["code"] = {}
    changed["data"] = {"train": "e" * 64}

    keys = [difference.key for difference in differences(INGREDIENTS, changed)]

    assert keys == [
        "settings.learning_rate",
        "data.train",
        "inputs.dataset",
        "code.redco_flow.stages.train.config",
    ]


def test_added_and_removed_keys_are_differences():
    added = _changed("settings", "num_beams", value=4)

    assert next(differences(INGREDIENTS, added)) == Difference("settings.num_beams", ABSENT, 4)
    assert next(differences(added, INGREDIENTS)) == Difference("settings.num_beams", 4, ABSENT)


def test_numbers_that_only_python_calls_equal_differ_as_their_fingerprints_do():
    for value in (False, 0.0):
        changed = _changed("settings", "seed", value=value)

        assert fingerprint(changed) != fingerprint(INGREDIENTS)
        assert next(differences(INGREDIENTS, changed)).key == "settings.seed"


def test_a_difference_reads_as_a_sentence_with_short_digests():
    rate = next(differences(INGREDIENTS, _changed("settings", "learning_rate", value=2e-4)))
    data = next(differences(INGREDIENTS, _changed("data", "train", value="d" * 64)))
    inputs = next(differences(INGREDIENTS, _changed("inputs", "dataset", value=["d" * 64])))

    assert str(rate) == "settings.learning_rate: 0.0001 → 0.0002"
    assert str(data) == "data.train: bbbbbbbbbbbb → dddddddddddd"
    assert str(inputs) == "inputs.dataset: [aaaaaaaaaaaa] → [dddddddddddd]"


def test_a_setting_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        fingerprint(_changed("settings", "learning_rate", value=float("nan")))

"""Which output each input takes, in any graph of stages, and in which order they can run."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_flow.spec.load import InputRef
from redco_flow.spec.references import cycles_of, order_of

FORK = """\
name: fork
recipe: my_kinds.recipe
stages:
  compare: {kind: my_kinds.compare}
  evaluate_small: {kind: my_kinds.evaluate, predictions: predict_small, metrics: [rouge]}
  evaluate_large: {kind: my_kinds.evaluate, predictions: predict_large, metrics: [rouge]}
  predict_large: {kind: my_kinds.predict, checkpoint: train.large/best/bleu}
  predict_small: {kind: my_kinds.predict, checkpoint: train}
  train: {kind: my_kinds.train, learning_rate: 1e-4}
  train.large: {kind: my_kinds.train, learning_rate: 1e-5, keep: {best: [bleu]}}
  preprocess: {kind: my_kinds.preprocess}
"""


def test_two_trainings_share_a_dataset_and_end_in_one_comparison(load):
    stages = load(FORK).stages

    assert list(stages) == [
        "preprocess",
        "train",
        "predict_small",
        "evaluate_small",
        "train.large",
        "predict_large",
        "evaluate_large",
        "compare",
    ]
    assert stages["train"].inputs == stages["train.large"].inputs
    assert stages["predict_small"].inputs["checkpoint"] == (InputRef("train", "checkpoint/last"),)
    assert stages["predict_large"].inputs["checkpoint"] == (
        InputRef("train.large", "checkpoint/best/bleu"),
    )
    assert stages["compare"].inputs["scores"] == (
        InputRef("evaluate_small", "metrics"),
        InputRef("evaluate_large", "metrics"),
    )


def test_a_list_of_references_keeps_its_order(load):
    text = FORK.replace("compare}", "compare, scores: [evaluate_large, evaluate_small]}")

    assert [ref.stage for ref in load(text).stages["compare"].inputs["scores"]] == [
        "evaluate_large",
        "evaluate_small",
    ]


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        (", checkpoint: train}", "}", "8:3",
         "stage 'predict_small' needs one checkpoint, and several stages produce one: train, "
         "train.large; choose with `checkpoint: train` or `checkpoint: train/SELECTOR`"),
        ("checkpoint: train}", "checkpoint: best/bleu}", "8:43",
         "'checkpoint' of stage 'predict_small': there is no stage 'best/bleu'. Stages that "
         "produce checkpoint: train, train.large; write STAGE/SELECTOR."),
        ("checkpoint: train}", "checkpoint: trane}", "8:43",
         "'checkpoint' of stage 'predict_small': there is no stage 'trane'; did you mean 'train'?"),
        ("checkpoint: train}", "checkpoint: preprocess}", "8:43",
         "'checkpoint' of stage 'predict_small' takes checkpoint, but stage 'preprocess' produces "
         "dataset; stages that produce checkpoint: train, train.large"),
        ("checkpoint: train}", "checkpoint: predict_small}", "8:43",
         "'checkpoint' of stage 'predict_small' takes the stage's own output; name another stage"),
        ("best/bleu", "best/blue", "7:43",
         "'checkpoint' of stage 'predict_large': stage 'train.large' has no output "
         "'checkpoint/best/blue'; did you mean 'best/bleu'? Its outputs: checkpoint/last, "
         "checkpoint/best/bleu."),
        ("best/bleu", "best/accuracy", "7:43",
         "'checkpoint' of stage 'predict_large': stage 'train.large' has no output "
         "'checkpoint/best/accuracy'. Its outputs: checkpoint/last, checkpoint/best/bleu. To keep "
         "it, add `keep: {best: [bleu, accuracy]}` to stage 'train.large'."),
        ("checkpoint: train}", "checkpoint: [train]}", "8:43",
         "'checkpoint' of stage 'predict_small' must be one reference (STAGE/SELECTOR)"),
        ("my_kinds.compare}", "my_kinds.compare, scores: []}", "4:37",
         "'scores' of stage 'compare' must be a list of references"),
        ("my_kinds.compare}", "my_kinds.compare, scores: [evaluate_small, evaluate_small]}",
         "4:37", "'scores' of stage 'compare' names the same output twice"),
        ("  preprocess: {kind: my_kinds.preprocess}\n", "", "6:3", None),
    ],
)  # fmt: skip
def test_a_reference_that_cannot_be_is_told_with_the_cure(problems, old, new, place, message):
    """Fault 27: all mistakes are reported at once, each with its line; nothing is submitted."""
    found = problems(FORK.replace(old, new))

    if message is None:
        assert [p.line for p in found] == [7, 8, 9, 10]  # each stage that takes the dataset
        assert all(
            "needs 'dataset' (dataset), and no other stage produces" in p.message for p in found
        )
    else:
        assert [f"{p.line}:{p.column}" for p in found] == [place]
        assert found[0].message.startswith(message)


def test_a_misspelt_stage_is_no_selector_of_the_only_producer(problems, chain):
    (problem,) = problems(chain.replace("best/rouge2", "trian/last"))

    assert (problem.line, problem.column) == (19, 5)
    assert "there is no stage 'trian/last'; did you mean 'train'?" in problem.message


def test_a_selector_alone_is_one_of_the_only_producer(load, chain):
    stage = load(chain.replace("best/rouge2", "last")).stages["predict"]

    assert stage.inputs["checkpoint"] == (InputRef("train", "checkpoint/last"),)


def test_a_circle_of_stages_is_told_with_its_line(problems):
    """Fault 27: all mistakes are reported at once, each with its line; nothing is submitted."""
    text = """\
    name: circle
    recipe: my_kinds.recipe
    stages:
      one: {kind: my_kinds.compare, scores: [three, other]}
      two: {kind: my_kinds.compare, scores: [one]}
      three: {kind: my_kinds.compare, scores: two}
      other: {kind: my_kinds.compare, scores: [last]}
      last: {kind: my_kinds.compare, scores: other}
    """

    found = [f"{p.line}:{p.column}: {p.message}" for p in problems(text)]

    assert found == [
        "4:33: stages form a circle: 'one' needs 'three' needs 'two' needs 'one'",
        "7:35: stages form a circle: 'other' needs 'last' needs 'other'",
    ]


def test_a_stage_of_unknown_kind_does_not_make_others_wrong(problems, chain):
    (problem,) = problems(chain.replace("my_kinds.preprocess", "my_kinds.preproces"))

    assert (problem.line, problem.column) == (9, 5)


_GRAPHS = st.integers(1, 7).flatmap(
    lambda size: st.lists(
        st.sets(st.integers(0, size - 1), max_size=3), min_size=size, max_size=size
    )
)


@settings(max_examples=300, deadline=None)
@given(_GRAPHS)
def test_the_order_is_topological_and_what_is_left_out_stands_on_a_circle(graph):
    names = [f"s{i}" for i in range(len(graph))]
    upstream = {name: {f"s{i}" for i in edges} for name, edges in zip(names, graph, strict=True)}

    order = order_of(names, upstream)
    cycles = cycles_of(names, upstream)

    for place, name in enumerate(order):
        assert upstream[name] <= set(order[:place])
        # Deterministic: of those that were ready, the first in the file.
        ready = [n for n in names if n not in order[:place] and upstream[n] <= set(order[:place])]
        assert name == ready[0]
    assert (len(order) < len(names)) == bool(cycles)
    for cycle in cycles:
        for name, needed in itertools.pairwise([*cycle, cycle[0]]):
            assert needed in upstream[name]

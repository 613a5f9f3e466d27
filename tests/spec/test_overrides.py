"""`key=value` and `~key`: which key is meant, and what the value is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_flow.spec.overrides import read_override


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-4", 1e-4),
        ("3", 3),
        ("true", True),
        ("null", None),
        ("", ""),
        ("no", "no"),
        ("010", "010"),
        ("12:30:00", "12:30:00"),
        ("summarize: ", "summarize: "),
        ("a=b", "a=b"),
        ("/data/my file.csv", "/data/my file.csv"),
        ("C:\\x # y", "C:\\x # y"),
        ("*x", "*x"),
        ("!x", "!x"),
        ("'1e-4'", "1e-4"),
        ('"a\\tb"', "a\tb"),
        ("'it''s'", "it's"),
        ("[1, 'b', [c]]", [1, "b", ["c"]]),
        ("{a: 1, b: {c: no}}", {"a": 1, "b": {"c": "no"}}),
        ("${env:X}", "${env:X}"),
    ],
)
def test_a_value_is_a_plain_scalar_or_quoted_or_a_collection(written, value):
    override, problems = read_override(f"key={written}")

    assert problems == []
    assert override.value == value
    assert type(override.value) is type(value)


@pytest.mark.parametrize(
    "text", ["key", "=3", "~", "~a=3", "", "a='x", "a=[1", "a={a: !!x y}", "a=\x07", "a=1e999"]
)
def test_what_is_no_override_is_a_problem_on_the_command_line(text):
    override, problems = read_override(text)

    assert override is None
    assert {problem.source for problem in problems} == {"command line"}


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_argument_is_an_override_or_a_problem(text):
    override, problems = read_override(text)

    assert (override is None) == bool(problems)


@pytest.mark.parametrize(
    "key", ["learning_rate", "train.learning_rate", "stages.train.learning_rate"]
)
def test_a_key_may_be_its_end_where_that_is_unique(load, chain, key):
    assert load(chain, f"{key}=0.5").stages["train"].config.learning_rate == 0.5


def test_a_section_s_key_means_the_section_and_a_stage_s_name_its_own_copy(load, chain):
    pipeline = load(chain, "dtype=bfloat16", "preprocess.data.source_key=mine")

    assert pipeline.document["model"]["dtype"] == "bfloat16"
    assert pipeline.stages["preprocess"].config.data.source_key == "mine"
    assert pipeline.document["data"]["source_key"] == "document"


def test_an_input_slot_can_be_overridden(load, chain):
    pipeline = load(chain, "predict.checkpoint=train/last")

    assert pipeline.stages["predict"].inputs["checkpoint"][0].output == "checkpoint/last"


def test_a_key_that_means_the_same_in_several_stages_sets_all_and_says_so(load, chain):
    text = chain.replace(
        "predict:", "second: {kind: my_kinds.train, learning_rate: 0.1}\n  predict:"
    )
    pipeline = load(text, "num_epochs=7", "checkpoint=train/last")

    assert [pipeline.stages[name].config.num_epochs for name in ("train", "second")] == [7, 7]
    assert pipeline.notes == (
        "'num_epochs' sets stages.second.num_epochs, stages.train.num_epochs",
    )


def test_a_full_name_sets_one_of_several_stages_and_says_nothing(load, chain):
    text = chain.replace(
        "predict:", "second: {kind: my_kinds.train, learning_rate: 0.1}\n  predict:"
    )
    pipeline = load(text, "second.num_epochs=7", "checkpoint=train/last")

    assert pipeline.stages["second"].config.num_epochs == 7
    assert pipeline.stages["train"].config.num_epochs != 7
    assert pipeline.notes == ()


def test_a_later_override_wins_and_a_deletion_gives_the_default(load, chain):
    overrides = ["num_epochs=3", "train.num_epochs=4", "~keep.best", "checkpoint=last"]
    pipeline = load(chain, *overrides)
    config = pipeline.stages["train"].config

    assert config.num_epochs == 4
    assert "'stages.train.num_epochs' is given more than once" in pipeline.notes[0]
    assert config.keep.best == []


def test_a_key_that_is_a_mistake_in_the_file_can_be_deleted(load, chain):
    load(chain.replace("source_key", "sauce_key"), "~data.sauce_key")


def test_a_mapping_replaces_what_stood_there(load, chain):
    pipeline = load(chain, "checkpoint=last", "keep={last: 3}")

    assert pipeline.stages["train"].config.keep.model_dump() == {"last": 3, "best": []}


def test_a_whole_stage_can_be_added_and_taken_away(load, chain):
    pipeline = load(
        chain,
        "stages.second={kind: my_kinds.evaluate, predictions: predict, metrics: [bleu]}",
        "second.metrics=[exact_match]",
        "~stages.evaluate",
    )

    assert list(pipeline.stages)[-1] == "second"
    assert "evaluate" not in pipeline.stages
    assert pipeline.stages["second"].config.metrics == ["exact_match"]


def test_a_stage_s_kind_can_be_changed_before_its_keys(load, chain):
    pipeline = load(
        chain,
        "~evaluate.metrics",
        "evaluate.kind=my_kinds.compare",
        "stages.e.kind=my_kinds.evaluate",
        "e.metrics=[rouge]",
        "num_samples=9",
    )

    assert pipeline.stages["evaluate"].config.num_samples == 9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lerning_rate=1", "there is no setting 'lerning_rate'; did you mean 'learning_rate'?"),
        ("train.lerning_rate=1", "stage 'train' has no key 'lerning_rate'; did you mean "
         "'learning_rate'? Similar keys: learning_rate; all 14 are in"),
        ("data.sauce_key=1", "'data' has no key 'sauce_key'; did you mean 'source_key'?"),
        ("stages.trane.num_epochs=1", "there is no setting 'stages.trane.num_epochs'; did you mean "
         "'stages.train.num_epochs'?"),
        ("~nothing", "there is no setting 'nothing'"),
        ("gpus_per_host=1", "'gpus_per_host' stands for several settings; write one of: "
         "stages.evaluate.resources.gpus_per_host, stages.predict.resources.gpus_per_host,"),
        ("train=1", "'train' stands for several settings; write one of: data.tokenizer.train, "
         "data.train, stages.train"),
        ("learning_rate=fast", "'stages.train.learning_rate' must be a number, not 'fast'"),
        ("train.keep={lasst: 1}", "'stages.train.keep' has no key 'lasst'; did you mean 'last'?"),
        ("~learning_rate", "stage 'train' needs the key 'learning_rate'"),
    ],
)  # fmt: skip
def test_an_override_that_cannot_be_is_told_like_a_mistake_in_the_file(
    problems, chain, override, message
):
    """Engine case 3: the error names its position and the nearest known name. Engine case 4: the
    error comes before any job.
    """
    found = [problem.message for problem in problems(chain, override)]

    assert found[0].startswith(message), found


def test_mistakes_of_file_and_command_line_are_told_together(problems, chain):
    found = problems(chain.replace("64", "-1", 1), "a=1", "b", "num_epochs=x")

    assert [problem.source == "command line" for problem in found] == [False, True, True, True]

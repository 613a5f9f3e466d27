"""benchmarks/paradigms.py: what it counts, and which baseline stands beside which metric."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "paradigms.py"


@pytest.fixture(scope="module")
def paradigms():
    spec = importlib.util.spec_from_file_location("paradigms", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_blank_lines_comments_and_docstrings_are_no_code(paradigms):
    head = '"""A module.\n\nOf two lines.\n"""\n\n# why\nTEXT = """a\nb"""\n\n\n'
    function = 'def f():\n    """It."""\n    return (\n        1  # one\n    )\n'

    assert paradigms.count_code(head + function) == 6


def test_a_scripts_trivial_baseline_is_the_last_that_is_named_after_its_metric(paradigms):
    found = paradigms.score_of_script(
        {
            "loss": 0.1,
            "accuracy": 0.9,
            "epsilon": 2.0,
            "accuracy_of_peer": 0.95,
            "accuracy_of_x": 0.1,
        }
    )

    assert (found.metric, found.value) == ("accuracy", 0.9)
    assert (found.baseline_name, found.baseline) == ("of_x", 0.1)


def test_a_script_whose_metric_has_no_baseline_is_told(paradigms):
    with pytest.raises(ValueError, match="no metric has a baseline named after it: loss, accuracy"):
        paradigms.score_of_script({"loss": 0.1, "accuracy": 0.9})


@pytest.mark.parametrize(("direction", "name", "value"), [("max", "b", 3.0), ("min", "a", 2.0)])
def test_an_evaluation_stands_beside_its_best_baseline(paradigms, direction, name, value):
    baselines = {"a": {"metrics": {"x": 2.0, "y": 0}}, "b": {"metrics": {"x": 3.0}}}
    known = {"baselines": baselines, "directions": {"x": direction}}

    found = paradigms.score_of_evaluation({"y": 9.0, "x": 5.0}, known, "x")

    assert (found.metric, found.value, found.baseline_name, found.baseline) == (
        "x",
        5.0,
        name,
        value,
    )


def test_an_evaluation_by_another_metric_tells_the_first_that_has_a_baseline(paradigms):
    known = {"baselines": {"a": {"metrics": {"y": 1.0}}}}

    for wanted in ("eval_loss", "x"):
        assert paradigms.score_of_evaluation({"x": 5.0, "y": 9.0}, known, wanted).metric == "y"
    assert paradigms.score_of_evaluation({"x": 5.0}, {}, "eval_loss").baseline is None


def test_pipelines_that_need_data_or_the_hub_are_left_out(paradigms):
    names = [path.stem for path in paradigms.offline_pipelines([])]

    assert {"quickstart", "fedavg", "dp_sgd", "distillation"} <= set(names)
    assert not {"e2e_nlg", "t5_xsum", "llama_lora", "drill"} & set(names)
    assert [p.stem for p in paradigms.offline_pipelines(["maml"])] == ["maml"]

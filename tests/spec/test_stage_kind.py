"""Stage kinds are found by name, and their declarations are checked."""

from __future__ import annotations

import textwrap

import pytest

from redco_flow.spec.modules import find_module, module_problem
from redco_flow.spec.stage_kind import InputSlot, StageConfig, find_stage_kind


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write an importable module; return its dotted name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str, name: str) -> str:
        folder = tmp_path / f"kinds_{name}"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
        return f"kinds_{name}.{name}"

    return write


def test_a_user_s_own_kind_is_found_by_its_dotted_name():
    kind = find_stage_kind("my_kinds.predict")

    assert kind.module == kind.name == "my_kinds.predict"
    assert issubclass(kind.config_type, StageConfig)
    assert kind.inputs["checkpoint"] == InputSlot(kind="checkpoint", default_selector="last")
    assert kind.outputs == {"predictions": "predictions"}
    assert kind.sections == ("recipe",)


def test_what_a_kind_leaves_out_has_a_default():
    kind = find_stage_kind("my_kinds.evaluate")
    config = kind.config_type(metrics=["rouge"])

    assert kind.code_modules(config) == ["my_kinds.evaluate"]
    assert kind.data_files(config) == []
    assert kind.data_identity(config) == {}
    assert kind.output_names is None


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "empty", r"has no class Config\(StageConfig\)"),
        ("class Config: pass", "plain", r"has no class Config\(StageConfig\)"),
        ("raise RuntimeError('no disk')", "raises", "importing .* failed: RuntimeError: no disk"),
        ("import no_such_package", "imports", "failed: ModuleNotFoundError"),
        ("def run(", "syntax", "failed: SyntaxError"),
        (
            "from redco_flow.spec.stage_kind import StageConfig as Config",
            "norun",
            "no function run",
        ),
        (
            """
            from redco_flow.spec.stage_kind import StageConfig as Config
            def run(context, config): ...
            SECTIONS = ("model",)
            """,
            "section",
            "SECTIONS names 'model', which is no field of Config",
        ),
        (
            """
            from redco_flow.spec.stage_kind import StageConfig as Config
            def run(context, config): ...
            SECTIONS = ("stages",)
            """,
            "badsection",
            "SECTIONS names 'stages'; allowed: recipe, model, data",
        ),
        (
            """
            from redco_flow.spec.stage_kind import InputSlot, StageConfig as Config
            def run(context, config): ...
            INPUTS = {"resources": InputSlot(kind="dataset")}
            """,
            "slot",
            "INPUTS names 'resources', which is also a key of the stage",
        ),
        (
            """
            from redco_flow.spec.stage_kind import StageConfig as Config
            def run(context, config): ...
            OUTPUTS = {"weights": "checkpoint"}
            """,
            "output",
            "'weights' must be named like its artifact kind",
        ),
    ],
)
def test_a_module_that_is_no_stage_kind_says_why(module, text, name, message):
    with pytest.raises(ValueError, match=message):
        find_stage_kind(module(text, name))


@pytest.mark.parametrize(
    "name", ["no_such", "no.such.module", "a..b", "", "os;x", "../x", "x.", "é"]
)
def test_a_kind_that_is_no_module_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"there is no stage kind .* Known kinds: "):
        find_stage_kind(name)


def test_a_module_is_found_without_being_imported(module):
    name = module("raise SystemExit('imported')", "unimported")

    assert find_module("redco_flow.recipes", name) == name
    assert module_problem("redco_flow.recipes", name, what="recipe", defines="build") is None


def test_a_package_that_fails_to_import_is_told(module, tmp_path):
    module("", "inner")
    (tmp_path / "kinds_inner" / "__init__.py").write_text("raise ValueError('broken')")

    problem = module_problem(
        "redco_flow.recipes", "kinds_inner.inner", what="recipe", defines="build"
    )

    assert problem is not None
    assert "importing kinds_inner failed: ValueError: broken" in problem

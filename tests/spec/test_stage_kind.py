"""Stage kinds are found by name, and their declarations are checked."""

from __future__ import annotations

import textwrap

import pytest

from redco_flow.spec.names import find_module, module_problem
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

    assert kind.modules == (kind.run_module,) == (kind.name,) == ("my_kinds.predict",)
    assert issubclass(kind.config_type, StageConfig)
    assert kind.inputs["checkpoint"] == InputSlot(kind="checkpoint", default_selector="last")
    assert kind.outputs == {"predictions": "predictions"}
    assert kind.sections == ("recipe",)


def test_a_kind_of_two_modules_is_read_without_the_one_that_runs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "kinds_apart" / "stage"
    folder.mkdir(parents=True)
    (folder / "config.py").write_text(
        "from redco_flow.spec.stage_kind import StageConfig\n"
        "class Config(StageConfig):\n"
        "    num_shards: int = 1\n"
    )
    (folder / "run.py").write_text("raise RuntimeError('only jobs import this')\n")

    kind = find_stage_kind("kinds_apart.stage")

    assert kind.modules == ("kinds_apart.stage.config", "kinds_apart.stage.run")
    assert kind.run_module == "kinds_apart.stage.run"
    assert kind.runs_in_shards


def test_what_a_kind_leaves_out_has_a_default():
    kind = find_stage_kind("my_kinds.evaluate")
    config = kind.config_type(metrics=["rouge"])

    assert kind.modules == ("my_kinds.evaluate",)
    assert kind.code_modules(config) == []
    assert kind.data_files(config) == []
    assert kind.data_identity(config) == {}
    assert kind.output_names is None


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "empty", r"has no class Config\(StageConfig\)"),
        ("class Config: pass", "plain", r"has no class Config\(StageConfig\)"),
        (
            "raise RuntimeError('no disk')",
            "raises",
            r"failed at .*raises\.py:1: RuntimeError: no disk",
        ),
        ("import no_such_package", "imports", r"imports\.py:1: ModuleNotFoundError"),
        ("def run(", "syntax", r"syntax\.py:1: SyntaxError"),
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
            "SECTIONS names 'stages'; allowed: recipe, settings, model, data",
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


def test_a_missing_import_is_told_at_the_line_of_the_users_that_asks_for_it(module, tmp_path):
    name = module("", "asks")
    package = tmp_path / "kinds_asks"
    (package / "asks.py").write_text("import json\n\nfrom kinds_asks.deep import x\n")
    (package / "deep.py").write_text("\nimport not_installed_here\n")

    with pytest.raises(ValueError, match=r"deep\.py:2: ModuleNotFoundError: .*not_installed_here"):
        find_stage_kind(name)


def test_a_package_that_imports_a_missing_module_of_its_own_is_not_called_missing(module, tmp_path):
    module("", "within")
    (tmp_path / "kinds_within" / "__init__.py").write_text("import kinds_within.gone\n")

    with pytest.raises(ValueError, match=r"importing kinds_within.gone failed at .*__init__.py:1"):
        find_stage_kind("kinds_within.gone.kind")


@pytest.mark.parametrize("text", ["raise SystemExit(3)", "def run(context, config)\n    pass"])
def test_a_kind_that_ends_the_process_or_cannot_be_parsed_is_an_error(module, text):
    name = module(text, "ends")

    with pytest.raises(ValueError, match=r"importing kinds_ends.ends failed at .*ends\.py:1: S"):
        find_stage_kind(name)


def test_a_module_beside_the_pipeline_is_told_how_to_be_named(tmp_path, monkeypatch):
    (tmp_path / "shout.py").touch()
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ValueError, match=r"shout\.py of your own is 'python:shout'"):
        find_stage_kind("shout")


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
    assert "importing kinds_inner failed at " in problem
    assert "__init__.py:1: ValueError: broken" in problem

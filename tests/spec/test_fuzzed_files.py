"""Hundreds of broken pipelines and profiles: each is refused with its place, or loads."""

import copy
import json
import os
import random
import traceback
from functools import cache
from pathlib import Path

import pytest
import yaml

from redco_flow.errors import ConfigError, RedcoFlowError
from redco_flow.orchestrate.run.device_checks import check_devices
from redco_flow.orchestrate.run.ingredients import Sources
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.orchestrate.run.start import check_run
from redco_flow.spec.load import load_pipeline, load_profile
from redco_flow.tracking.workspace import Workspace

ROOT = Path(__file__).parents[2]
PIPELINES = sorted((ROOT / "pipelines").glob("*.yaml"))
PROFILES = sorted((ROOT / "cluster_profiles").glob("*.yaml"))
FILES = range(100, 100 + int(os.environ.get("REDCO_FLOW_TEST_FUZZED_FILES", "300")))

ODD_TEXTS = (
    *(
        ".inf",
        ".nan",
        "-.inf",
        "null",
        "~",
        "true",
        "no",
        "0",
        "-1",
        "1e400",
        "9" * 30,
        "0x1f",
        "1_0",
    ),
    *('""', "[]", "{}", "[[]]", "[null]", "[.inf]", "{a: 1}", "{1: 2}", "{null: 1}", "{[a]: b}"),
    *(
        "2024-01-01",
        "'.'",
        "'..'",
        "'.a'",
        "a.",
        "a..b",
        "../../x",
        "/",
        "${x}",
        "${env:HOME}",
        "${",
    ),
    *("${a.b[0]}", "&a [*a]", "*a", "!!python/object:os.system x", "!x y", "| \n", "a: b: c", "'"),
    *(
        "x" * 300,
        '"\\0"',
        '"\\x1b[2J"',
        '"\\u202e"',
        "é",
        "@file",
        "best/x",
        "train.",
        ".train",
        "%",
    ),
    *(
        "<<: {a: b}",
        "? a",
        "- a",
        "[1, 2",
        "{",
        "0.1.2",
        "1e-3",
        "best",
        "os",
        "os.path",
        "redco_flow",
    ),
)
ODD_VALUES = (
    *(
        float("inf"),
        float("nan"),
        None,
        True,
        0,
        -1,
        1e300,
        10**40,
        "",
        [],
        {},
        [[]],
        [None],
        [0.5],
    ),
    *(
        {"a": 1},
        {1: 2},
        {None: None},
        {"": ""},
        [float("inf")],
        ".inf",
        ".",
        "..",
        "a.",
        ".a",
        "a..b",
    ),
    *(
        "../x",
        "/",
        "${x}",
        "${",
        "x" * 300,
        "\0",
        "\x1b[2J",
        "\u202e",
        "best/x",
        "train",
        "os.path",
    ),
    *(
        {"type": None},
        {"train": {}},
        [[["a"]]],
        [{}],
        "1e-3",
        b"\x00\xff",
        "a/b",
        " ",
        "\n",
        "~",
        "%",
    ),
)

FRAGILE_KIND = """
from typing import Any
from pydantic import field_validator
from redco_flow.spec.stage_kind import StageConfig

SECTIONS = ()
INPUTS = {}
OUTPUTS = {}


class Config(StageConfig):
    odd: dict[str, Any]

    @field_validator("odd")
    @classmethod
    def _all_positive(cls, odd):
        assert all(value > 0 for value in odd.values())
        return odd


def run(context, config):
    pass
"""


def changed_text(text, rng):
    """The file after one to three accidents of an editor."""
    for _ in range(rng.randint(1, 3)):
        lines = text.splitlines() or [""]
        number = rng.randrange(len(lines))
        line, kind = lines[number], rng.randrange(9)
        if kind == 0:
            del lines[number]
        elif kind == 1:
            lines.insert(rng.randrange(len(lines) + 1), line)
        elif kind == 2:
            lines[number] = " " * rng.randint(0, 5) + line.lstrip()
        elif kind == 3 and ":" in line:
            lines[number] = line.partition(":")[0] + ": " + rng.choice(ODD_TEXTS)
        elif kind == 4:
            at = rng.randrange(len(line) + 1)
            lines[number] = line[:at] + rng.choice(ODD_TEXTS) + line[at:]
        elif kind == 5:
            at = rng.randrange(len(line) + 1)
            lines[number] = (
                line[:at] + rng.choice("\t:{}[]&*!|>'\"%@`#-?,\x00\x07é\u2028") + line[at:]
            )
        elif kind == 6:
            at = rng.randrange(len(line) + 1)
            lines[number] = line[:at] + line[at + 1 :]
        elif kind == 7:
            lines[number:] = [line[: rng.randrange(len(line) + 1)]]
        else:
            other = rng.randrange(len(lines))
            lines[number], lines[other] = lines[other], lines[number]
        text = "\n".join(lines) + "\n"
    return text


def places(value, found):
    """Each container of the document with one of its keys."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            places(value[key], found)
    return found


parsed = cache(yaml.safe_load)


def changed_values(text, rng):
    """The document after one to three changes of its values and keys."""
    document = copy.deepcopy(parsed(text))
    for _ in range(rng.randint(1, 3)):
        holders = places(document, [])
        if not holders:
            break
        holder, key = rng.choice(holders)
        kind = rng.randrange(6)
        odd = copy.deepcopy(rng.choice(ODD_VALUES))
        if kind <= 2:
            holder[key] = odd
        elif kind == 3:
            del holder[key]
        elif kind == 4 and isinstance(holder, dict):
            holder[rng.choice(["extra", "", 1, None, "name", "config", "a.b", key])] = odd
        else:
            holder[key] = copy.deepcopy(rng.choice(holders)[0])
    return yaml.safe_dump(document, allow_unicode=True, sort_keys=False)


def mutated(path, rng):
    text = path.read_text()
    return rng.choice([changed_text, changed_values])(text, rng)


@pytest.mark.parametrize("numbers", [range(100), pytest.param(FILES, marks=pytest.mark.slow)])
def test_broken_files_are_refused_in_words(tmp_path, monkeypatch, numbers):
    """No exception but the project's own, whatever is written, in files and in their data."""
    monkeypatch.chdir(tmp_path)
    workspace, sources = Workspace.open(tmp_path / "workspace"), Sources()
    local = load_profile(ROOT / "cluster_profiles" / "local.yaml")
    file = tmp_path / "fuzzed.yaml"
    escaped, num_refused = [], 0
    for number in numbers:
        rng = random.Random(number)
        path = rng.choice([*PIPELINES, *PIPELINES, *PROFILES])
        file.write_text(mutated(path, rng), encoding="utf-8", errors="surrogatepass")
        try:
            if path in PROFILES:
                load_profile(file)
            else:
                resolved = load_pipeline(file, (), local, looks_into_data=True)
                planned = make_plan(resolved, workspace, sources=sources)
                check_devices(resolved, local, planned, os.environ)
                check_run(resolved, local, planned)
        except RedcoFlowError:
            num_refused += 1
        except Exception:
            escaped.append(f"{number}, of {path.name}: {traceback.format_exc(limit=-4)}")

    assert not escaped, "\n".join(escaped[:5])
    assert len(numbers) // 2 < num_refused < len(numbers)


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        ("stages: {evaluate: {metrics: ['.inf']}}", "2:31", "no metric's name"),
        ("stages: {train: {}}\nmodel: {family: '.nan'}", "3:9", "no model family '.nan'"),
        (
            "stages: {train: {}}\nmodel: {config: {dropout_rate: null}}",
            "3:1",
            "dropout_rate is None; it must be a number",
        ),
        ("stages: {train: {}}\nmodel: {config: {feed_forward_proj: 3}}", "3:1", "must be text"),
        (
            "stages: {train: {}}\nmodel: {config: {remat: full, activations: {mlp_inn: keep}}}",
            "3:45",
            "did you mean 'mlp_in'? known names: layer_input",
        ),
        (
            "data: {dataset: x}\nstages: {preprocess: {max_length: 9}}",
            "3:23",
            "'max_length' would change nothing for recipe 'text_to_text'",
        ),
        (
            "stages: {preprocess: {tokenizer: x}}",
            "2:23",
            "no key 'tokenizer': it is a key of 'data'; did you mean 'tokenizer_of'?",
        ),
        (
            "stages: {preprocess: {}}\nnotify: {slack_env: 'https://hooks.slack.com/services/"
            "T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX'}",
            "3:10",
            "write the name of the environment variable",
        ),
    ],
)
def test_a_value_of_another_type_is_a_problem_with_its_place(tmp_path, change, place, words):
    """Each was a traceback."""
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"name: a\n{change}\nrecipe: text_to_text\n")

    with pytest.raises(ConfigError, match=f"pipeline.yaml:{place}: ") as raised:
        load_pipeline(file)

    assert words in str(raised.value)


@pytest.mark.parametrize("name", ["x" * 300, "y/" * 3000, "a\0b", "~nobody-of-this-name/x"])
@pytest.mark.parametrize(
    "change",
    [
        {"data": {"train": "NAME", "source_key": "a", "target_key": "b"}},
        {"data": {"dataset": "NAME", "source_key": "a", "target_key": "b"}},
        {"model": {"name_or_path": "NAME"}},
        {"stages": {"own": {"kind": "script", "path": "NAME"}}},
        {"stages": {"own": {"kind": "script", "path": "a.py", "inputs": {"teacher": "NAME"}}}},
    ],
    ids=["file", "dataset", "model", "script", "input"],
)
def test_a_name_that_no_file_can_have_is_a_file_that_is_not_there(
    tmp_path, monkeypatch, change, name
):
    """Each was a traceback of pathlib."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("")
    written = {"name": "a", "recipe": "text_to_text", "stages": {"preprocess": {}}} | change
    text = yaml.safe_dump(written)
    file = tmp_path / "pipeline.yaml"
    file.write_text(text.replace("NAME", json.dumps(name)))
    workspace = Workspace.open(tmp_path / "workspace")
    local = load_profile(ROOT / "cluster_profiles" / "local.yaml")

    def check():
        resolved = load_pipeline(file, (), local)
        check_run(resolved, local, make_plan(resolved, workspace, sources=Sources()))

    with pytest.raises(RedcoFlowError) as raised:
        check()

    assert str(raised.value).startswith(f"{file}:")
    assert not any(name in problem.message for problem in raised.value.problems if "\0" in name)


def test_a_check_that_takes_a_type_for_granted_names_the_value_it_broke_at(tmp_path, monkeypatch):
    """Also one of a stage kind of the user's own."""
    (tmp_path / "own_kinds").mkdir()
    (tmp_path / "own_kinds" / "fragile.py").write_text(FRAGILE_KIND)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "name: a\nstages:\n  own:\n    kind: own_kinds.fragile\n    odd: {a: 1, b: null}\n"
    )

    with pytest.raises(ConfigError) as raised:
        load_pipeline(file)

    (problem,) = raised.value.problems
    assert (problem.line, problem.column) == (5, 17)
    assert problem.message.startswith("'stages.own.odd.b' is null, which cannot be checked: ")


def test_of_thousands_of_mistakes_the_first_are_shown_and_the_rest_counted(tmp_path):
    """A file of another kind has one on every line."""
    file = tmp_path / "pipeline.yaml"
    keys = "".join(f"key{number}: 1\n" for number in range(2000))
    file.write_text(f"name: a\nstages: {{train: {{}}}}\n{keys}")

    with pytest.raises(ConfigError) as raised:
        load_pipeline(file)

    lines = str(raised.value).splitlines()
    assert len(lines) == 51
    assert len(raised.value.problems) >= 2000
    assert lines[-1] == f"… and {len(raised.value.problems) - 50:,} more mistakes."

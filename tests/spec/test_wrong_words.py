"""Wrong words at every key of every bundled pipeline: planning refuses them, or accepts them."""

from __future__ import annotations

import copy
import os
import random
import traceback
from functools import cache
from pathlib import Path

import pytest

from redco_flow.errors import RedcoFlowError
from redco_flow.orchestrate.pins.aliases import AliasPins
from redco_flow.orchestrate.pins.hub import HubPins
from redco_flow.orchestrate.run.device_checks import check_devices
from redco_flow.orchestrate.run.ingredients import Sources
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.orchestrate.run.start import check_run
from redco_flow.spec.document import Origin, written_at
from redco_flow.spec.load import PipelineFile, load_pipeline, load_profile
from redco_flow.spec.yaml import parse_file, write_yaml
from redco_flow.tracking.workspace import Workspace

ROOT = Path(__file__).parents[2]
PIPELINES = sorted((ROOT / "pipelines").glob("*.yaml"))
LOCAL = ROOT / "cluster_profiles" / "local.yaml"
SPLITS = ("train", "validation", "test")
SEED = 25


def wrong_words(value):
    """Twenty kinds of wrong values for one place, by the kind's name.

    Control characters never come as far: the reader of files refuses them, see test_strict_yaml.
    """
    text = str(value)
    return {
        "typo": text[:-1],
        "letter too many": f"{text}x",
        "capitals": text.title(),
        "empty": "",
        "long": "x" * 5000,
        "newline": "a\nb",
        "unicode": "ünï—✓",
        "path": "/etc/passwd",
        "upwards": "../../x",
        "device": "/dev/zero",
        "number": 5,
        "fraction": 0.5,
        "list": ["a", "b"],
        "mapping": {"a": 1},
        "null": None,
        "boolean": True,
        "module": "python:nope",
        "own module": "recipe",
        "alias": "@nope",
        "variable": "${env:NOPE}",
        "address": "https://example.com/x",
        "pattern": "*.nope",
        "stage": "train/best/x",
        "unknown user": "~nobody-of-this-name/x",
    }


def leaves(value, path=()):
    """The path of each value, lists and mappings included."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index))


def with_value(document, path, value):
    document = copy.deepcopy(document)
    holder = document
    for part in path[:-1]:
        holder = holder[part]
    holder[path[-1]] = value
    return document


@cache
def written(name, train_file):
    """A bundled pipeline; one that wants its data from the command line gets a file."""
    document = copy.deepcopy(parse_file(ROOT / "pipelines" / f"{name}.yaml")[0].values)
    data = document.get("data", {})
    if "dataset" not in data and "mixture" not in data:
        document["data"] = data | dict.fromkeys(SPLITS, train_file)
    return document


@cache
def resolved(name, train_file):
    """The same with all keys that have defaults."""
    path = Path(train_file).with_name(f"{name}.yaml")
    path.write_text(write_yaml(written(name, train_file)))
    return load_pipeline(path, (), load_profile(LOCAL), environ={}).document


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Plan a document as the verb does, in parts, so that files are read and parsed once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    profile, workspace = load_profile(LOCAL), Workspace(tmp_path / "workspace")
    sources, hub, aliases = Sources(), HubPins(), AliasPins()

    def plan_document(document):
        file = PipelineFile(Path("a.yaml"), written_at(document, Origin("a.yaml", 1, 1)), ())
        resolved = load_pipeline(file, (), profile, looks_into_data=True)
        resolved, _ = hub.pinned(resolved, workspace)
        resolved, _ = aliases.pinned(resolved, workspace)
        made = make_plan(resolved, workspace, sources=sources)
        check_devices(resolved, profile, made, os.environ)
        check_run(resolved, profile, made)

    return plan_document


@pytest.mark.parametrize(
    ("read", "count"), [(written, 60), pytest.param(resolved, 80, marks=pytest.mark.slow)]
)
def test_a_wrong_word_at_any_key_is_no_traceback(tmp_path, plan, read, count):
    """A sample (seed 25) of all keys of all pipelines, times the kinds of wrong words."""
    train = tmp_path / "train.csv"
    train.write_text("source,target\na,b\nc,d\n")
    everything = [
        (path.stem, place, kind)
        for path in PIPELINES
        for place in leaves(read(path.stem, str(train)))
        for kind in wrong_words("")
    ]
    escaped, num_refused = [], 0

    for name, path, kind in random.Random(SEED).sample(everything, count):
        document = value = read(name, str(train))
        for part in path:
            value = value[part]
        try:
            plan(with_value(document, path, wrong_words(value)[kind]))
        except RedcoFlowError:
            num_refused += 1
        except Exception:
            escaped.append(f"{name} {path} {kind}: {traceback.format_exc(limit=-3)}")

    assert not escaped, "\n".join(escaped[:5])
    assert num_refused > count // 2


@pytest.mark.parametrize("kind", wrong_words(""))
def test_a_wrong_recipe_is_no_traceback(tmp_path, plan, kind):
    """The recipe decides how all that comes after it is checked."""
    document = copy.deepcopy(written("classification", ""))
    word = wrong_words("classification")[kind]

    with pytest.raises(RedcoFlowError) as raised:
        plan(document | {"recipe": word})

    assert "recipe" in str(raised.value)


@pytest.mark.parametrize("name", ["ünï—✓", "a b", "x" * 200, "a--b", "name.git"])
@pytest.mark.parametrize("section", ["model", "data"])
def test_a_name_that_no_repository_can_have_is_refused_without_the_hub(plan, section, name):
    """Offline, where the cache is asked instead, it was a traceback of huggingface_hub."""
    document = copy.deepcopy(written("classification", ""))
    if section == "model":
        document["model"] = {"name_or_path": name}
    else:
        document["data"] |= {"dataset": name, "tokenizer": {"train": {}}}

    with pytest.raises(RedcoFlowError, match="is no name of a repository on the hub"):
        plan(document)

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from redco_flow.models.find import FAMILIES, find_config, find_model, find_module_name
from redco_flow.tracking.code_digest import module_digests

FACE = (
    "Config", "init_params", "abstract_params", "apply", "tensor_layouts", "config_of_tensors",
    "IGNORED_TENSORS",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_whole_face(family):
    model = find_model(family)

    assert [name for name in FACE if not hasattr(model, name)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_found_alone_is_that_of_the_family(family):
    assert find_config(family) is find_model(family).Config


@pytest.mark.parametrize("family", FAMILIES)
def test_the_code_that_a_family_depends_on_includes_the_model_that_it_shares(family):
    """Its functions are taken when they are asked for, and still determine a result."""
    shared = find_model(family).apply.__module__

    assert shared in module_digests((find_module_name(family),))


def test_no_config_needs_jax():
    """A login node has none, or would wait seconds for it."""
    code = (
        "import sys; from redco_flow.models.find import FAMILIES, find_config\n"
        "for family in FAMILIES: find_config(family)()\n"
        "print(sorted({'jax', 'flax'} & sys.modules.keys()))"
    )

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"


def test_a_dotted_name_is_the_users_own_family(tmp_path, monkeypatch):
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "tiny.py").write_text("class Config: ...\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert find_model("lab.tiny").__name__ == "lab.tiny"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bertt", "did you mean 'bert'? Known"),
        ("gemma3", "did you mean 'gemma3_text'? Known"),
        ("no.such.module", "known"),
        ("t5.layers", "known"),
    ],
)
def test_an_unknown_family_is_refused_with_the_nearest_and_those_known(name, hint):
    with pytest.raises(ValueError, match=re.escape(f"no model family '{name}'; {hint}: t5")):
        find_model(name)


def test_a_module_that_is_no_family_is_refused():
    with pytest.raises(ValueError, match=r"module json\.tool is no model family"):
        find_model("json.tool")

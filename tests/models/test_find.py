from __future__ import annotations

import re
import subprocess
import sys

import pytest

from redco_flow.models.families import decoder_family, encoders
from redco_flow.models.find import (
    DECODERS,
    ENCODERS,
    FAMILIES,
    find_config,
    find_model,
    find_module_name,
)
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


def test_names_by_kind_are_those_of_the_tables():
    """A class in a table whose name is not listed would not be found, nor offered by a recipe."""
    tables = {sys.modules[find_config(name).__module__] for name in FAMILIES}
    classes = {
        config.model_type.replace("-", "_"): config
        for table in tables
        for config in vars(table).values()
        if isinstance(config, type) and hasattr(config, "model_type")
    }

    def of_kind(kind):
        return {name for name, config in classes.items() if issubclass(config, kind)}

    assert set(classes) == set(FAMILIES)
    assert of_kind(decoder_family.DecoderFamilyConfig) == set(DECODERS)
    assert of_kind(encoders.BertFamilyConfig) == set(ENCODERS)


def test_no_config_needs_jax():
    """A login node has none, or would wait seconds for it."""
    code = (
        "import sys; from redco_flow.models.find import FAMILIES, find_config\n"
        "for family in FAMILIES: find_config(family)()\n"
        "print(sorted({'jax', 'flax'} & sys.modules.keys()))"
    )

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"


OWN_CONFIG = """
from dataclasses import dataclass
from typing import ClassVar

from redco_flow.models.families.decoder_family import LlamaFamilyConfig


@dataclass(frozen=True)
class Config(LlamaFamilyConfig):
    model_type: ClassVar[str] = "falcon"
    architecture: ClassVar[str] = "FalconForCausalLM"
    scales_embedding: ClassVar[bool] = True

    hidden_act: str = "silu"
"""
OWN_FUNCTIONS = """
class Config: ...

IGNORED_TENSORS = ()

def init_params(config, key): ...
def abstract_params(config): ...
def apply(config, params, input_ids): ...
def tensor_layouts(config): ...
def config_of_tensors(config, files): return config
"""


@pytest.fixture
def lab(tmp_path, monkeypatch, request):
    """A package of the user's own, whose module `lab_<test>.tiny` has a given text."""
    name = f"lab_{abs(hash(request.node.name))}"

    def write(text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tiny.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return f"{name}.tiny"

    return write


def test_a_users_own_config_has_the_functions_of_its_kind(lab):
    model = find_model(lab(OWN_CONFIG))

    config = model.Config.from_hugging_face({"model_type": "falcon", "hidden_size": 64})
    assert config.core.embedding_scale == 8
    assert hasattr(model, "prefill")


def test_a_users_own_functions_are_taken_as_they_are(lab):
    name = lab(OWN_FUNCTIONS)

    assert find_model(name).__name__ == name


def test_own_functions_beside_those_of_a_kind_are_refused(lab):
    """They would not be called."""
    name = lab(OWN_CONFIG + "\n\ndef config_of_tensors(config, files): ...\n")

    with pytest.raises(ValueError, match="is no model family: it has no init_params, apply"):
        find_model(name)


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

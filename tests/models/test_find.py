from __future__ import annotations

import pytest

from redco_flow.models.find import FAMILIES, find_model

FACE = (
    "Config", "init_params", "abstract_params", "apply", "tensor_layouts", "config_of_tensors",
    "IGNORED_TENSORS",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_whole_face(family):
    model = find_model(family)

    assert [name for name in FACE if not hasattr(model, name)] == []


def test_a_dotted_name_is_the_users_own_family(tmp_path, monkeypatch):
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "tiny.py").write_text("class Config: ...\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert find_model("lab.tiny").__name__ == "lab.tiny"


@pytest.mark.parametrize("name", ["gpt17", "no.such.module", "t5.layers"])
def test_an_unknown_family_is_refused_with_those_known(name):
    with pytest.raises(ValueError, match=rf"no model family '{name}'; known: t5"):
        find_model(name)


def test_a_module_that_is_no_family_is_refused():
    with pytest.raises(ValueError, match=r"module json\.tool is no model family"):
        find_model("json.tool")

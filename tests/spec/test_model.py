"""The strict base model and the field types that stage kinds share."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import Field, ValidationError

from redco_flow.spec.model import (
    ContentOf,
    DataFile,
    OutputPath,
    Placement,
    PositiveInt,
    StrictModel,
    known_keys,
    marked,
)
from redco_flow.spec.pipeline import DataSection, TokenizerSection
from redco_flow.spec.stages import inside


class Inner(StrictModel):
    size: PositiveInt = 1
    workers: Annotated[PositiveInt, Placement()] = 1
    pair: tuple[int, ...] = ()


class Outer(StrictModel):
    inner: Inner = Inner()
    maybe: Inner | None = None
    ratio: float = 0.5


class Files(StrictModel):
    several: Annotated[list[DataFile], Field(min_length=1)] | None
    named: dict[str, DataFile]


@pytest.mark.parametrize(
    "values",
    [
        {"unknown": 1},
        {"ratio": "0.5"},
        {"ratio": True},
        {"inner": {"size": 1.0}},
        {"inner": {"size": 0}},
        {"inner": None},
        {"ratio": float("inf")},
        {"inner": {"size": "1"}},
    ],
)
def test_nothing_is_coerced_and_nothing_unknown_is_taken(values):
    """Engine case 4: the error comes before any job."""
    with pytest.raises(ValidationError):
        Outer.from_json(values)


def test_a_model_is_read_back_from_its_json_and_never_changes():
    model = Outer.from_json({"ratio": 1, "maybe": {"size": 2, "pair": [1, 2]}})

    assert Outer.from_json(model.model_dump(mode="json")) == model
    assert model.ratio == 1.0
    with pytest.raises(ValidationError, match="frozen"):
        model.ratio = 2.0


def test_marked_fields_are_found_at_any_depth():
    model = Outer(maybe=Inner(workers=3))
    data = DataSection(train="/a/b.csv")

    assert dict(marked(model, Placement)) == {("inner", "workers"): 1, ("maybe", "workers"): 3}
    assert dict(marked(data, ContentOf))[("train",)] == "/a/b.csv"
    assert dict(marked(Files(several=["/a"], named={"b": "/b"}), ContentOf)) == {
        ("several",): ["/a"],
        ("named",): {"b": "/b"},
    }


def test_known_keys_are_those_of_the_model_at_a_path():
    assert known_keys(Outer, ("maybe",)) == {"size", "workers", "pair"}
    assert known_keys(Outer, ("ratio",)) is None


@pytest.mark.parametrize("values", [{}, {"name_or_path": "x", "train": {}}])
def test_a_tokenizer_is_named_or_trained_not_both(values):
    with pytest.raises(ValidationError, match="either 'name_or_path' or 'train'"):
        TokenizerSection.from_json(values)


@pytest.mark.parametrize("path", ["..", "../x", "a/../../b", "/x", "~/x", "~x", ".", ""])
def test_an_output_path_may_not_climb_out(path):
    """Fault 29: the path is refused."""

    class Writes(StrictModel):
        path: OutputPath

    with pytest.raises(ValidationError):
        Writes.from_json({"path": path})


def test_a_path_through_a_link_that_stays_inside_is_inside(tmp_path):
    """Fault 29: the path is refused."""
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")

    assert inside(tmp_path, "link/x") == tmp_path / "link" / "x"


def test_a_path_through_a_link_that_leads_out_is_refused(tmp_path):
    """Fault 29: the path is refused."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path)

    for path in ("link/x", "link", "../x", "/x"):
        with pytest.raises(ValueError, match="leads out of the workspace"):
            inside(tmp_path / "root", path)

"""Stage kinds and recipes of a user's own, importable by dotted names; files to load."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from redco_flow.errors import ConfigError, Problem
from redco_flow.spec.load import ResolvedPipeline, load_pipeline

Write = Callable[..., Path]

CHAIN = Path(__file__).parent / "kinds" / "chain.yaml"


@pytest.fixture(autouse=True)
def _my_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "kinds"))


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a text to a file in the temporary directory."""

    def write_file(text: str, name: str = "pipeline.yaml") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def load(write: Write) -> Callable[..., ResolvedPipeline]:
    """Write a pipeline and load it."""
    return lambda text, *overrides, **rest: load_pipeline(write(text), overrides, **rest)


@pytest.fixture
def problems(write: Write) -> Callable[..., tuple[Problem, ...]]:
    """Write a pipeline that has mistakes; return them."""

    def problems_in(text: str, *overrides: str, **rest) -> tuple[Problem, ...]:
        with pytest.raises(ConfigError) as caught:
            load_pipeline(write(text), overrides, **rest)
        return caught.value.problems

    return problems_in


@pytest.fixture
def chain() -> str:
    """A pipeline of four stages in a row."""
    return CHAIN.read_text(encoding="utf-8")

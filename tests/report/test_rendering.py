"""Templates are compiled once for all processes, and again when they have changed."""

import shutil
import sys

import pytest

from redco_flow.report import rendering


@pytest.fixture(autouse=True)
def fresh_templates():
    yield
    rendering._environment.cache_clear()


def test_a_template_is_compiled_again_only_where_it_changed_or_its_file_is_damaged(
    tmp_path, monkeypatch
):
    folder = tmp_path / "templates"
    folder.mkdir()
    monkeypatch.setattr(rendering, "_FOLDER", tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)

    def render(text):
        (folder / "page.jinja").write_text(text)
        rendering._environment.cache_clear()
        return rendering.render("page.jinja", "page")

    assert render("one") == "one"
    (compiled,) = (folder / "__pycache__").iterdir()
    written = compiled.stat().st_mtime_ns
    assert render("one") == "one"
    assert compiled.stat().st_mtime_ns == written
    assert render("two") == "two"
    compiled.write_bytes(compiled.read_bytes()[:-9])
    assert render("two") == "two"
    shutil.rmtree(compiled.parent)
    compiled.parent.touch()  # no folder for compiled files can be made
    assert render("two") == "two"

"""Where files are looked for, and in which order."""

from __future__ import annotations

import pytest

from redco_flow.errors import UsageError
from redco_flow.spec.find import available, find_file


@pytest.mark.parametrize("given", ["local", "local.yaml", "cluster_profiles/local.yaml"])
def test_a_bundled_file_is_found_from_any_directory(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)

    found = find_file("cluster_profiles", given)

    assert found.name == "local.yaml"
    assert found.is_file()


def test_the_given_path_comes_before_the_folder_and_the_folder_before_the_bundle(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cluster_profiles"
    folder.mkdir()
    (folder / "local.yaml").write_text("")
    assert find_file("cluster_profiles", "local").resolve() == folder / "local.yaml"

    (tmp_path / "local.yaml").write_text("")
    assert find_file("cluster_profiles", "local").resolve() == tmp_path / "local.yaml"


def test_an_absolute_path_is_taken_as_it_is(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("")

    assert find_file("pipelines", path) == path


@pytest.mark.parametrize("given", ["absent", "../no/such", "/nowhere", "x" * 5000, "a\0b", ""])
def test_what_is_not_there_is_a_usage_error_that_lists_what_is(given):
    with pytest.raises(UsageError, match=r"Known: .*local"):
        find_file("cluster_profiles", given)


def test_files_of_a_folder_are_listed_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flows").mkdir()
    for name in ("mine.py", "_private.py", "notes.txt"):
        (tmp_path / "flows" / name).write_text("")

    assert "mine" in available("flows")
    assert not {"_private", "notes"} & set(available("flows"))

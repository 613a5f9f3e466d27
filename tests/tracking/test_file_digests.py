import json
import os
import time

import pytest
from blake3 import blake3

from redco_flow.errors import WorkspaceError
from redco_flow.tracking.file_digests import digest_files


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("a,b\n")
    return path


def _digest(text: str) -> str:
    return blake3(text.encode()).hexdigest()


def _later() -> int:
    """A clock that shows a time when every file here was written long ago."""
    return time.time_ns() + 3_000_000_000


def test_the_digest_is_that_of_the_bytes(workspace, data):
    assert digest_files(workspace, [data]) == {data: _digest("a,b\n")}


def test_an_unchanged_file_is_read_once_and_a_changed_one_again(workspace, data):
    first = digest_files(workspace, [data], now=_later)
    cache = json.loads((workspace.cache / "digests.json").read_text())
    assert cache[str(data)][-1] == first[data]
    # What is remembered is what is told: only a file that is not read gives this answer.
    cache[str(data)][-1] = "remembered"
    (workspace.cache / "digests.json").write_text(json.dumps(cache))
    assert digest_files(workspace, [data]) == {data: "remembered"}

    data.write_text("a,c\n")

    assert digest_files(workspace, [data]) == {data: _digest("a,c\n")}


def test_a_change_that_keeps_size_and_modification_time_is_seen(workspace, data):
    before = data.stat()
    digest_files(workspace, [data], now=_later)

    data.write_text("x,y\n")
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert data.stat().st_mtime_ns == before.st_mtime_ns
    assert digest_files(workspace, [data]) == {data: _digest("x,y\n")}


def test_a_file_written_just_now_is_not_remembered(workspace, data):
    digest_files(workspace, [data])

    assert not (workspace.cache / "digests.json").exists()


def test_a_damaged_cache_is_forgotten(workspace, data):
    for damage in ("{", "[]", json.dumps({str(data): "x"}), json.dumps({str(data): []})):
        (workspace.cache / "digests.json").write_text(damage)

        assert digest_files(workspace, [data]) == {data: _digest("a,b\n")}


def test_a_missing_file_is_named(workspace, tmp_path):
    with pytest.raises(WorkspaceError, match=r"missing\.csv: cannot be read"):
        digest_files(workspace, [tmp_path / "missing.csv"])

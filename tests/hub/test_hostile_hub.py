"""What a hub, or a mirror of it, must not make this program do."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
from huggingface_hub.utils import httpx

from redco_flow import hub as hub_module
from redco_flow.hub_guard import UnsafeHub, _check_answer, check_inside, guard_downloads

DOWNLOAD = """
import json, sys
from redco_flow.hub import HubError, download_model, look_up

errors = {}
for name in sys.argv[1:]:
    try:
        download_model(name, None, ["*"], lambda folder: True)
        errors[name] = ""
    except HubError as error:
        errors[name] = str(error)
print(json.dumps(errors))
"""


def test_no_answer_is_written_outside_of_the_cache_or_ends_in_a_traceback(hub, command):
    """An ETag names a file; `sha` a folder; and JSON may be of any shape."""
    sha = "0" * 40
    answers = {
        "tester/sha": json.dumps({"id": "tester/sha", "sha": "../../../evil", "siblings": []}),
        "tester/deep": "[" * 200_000,
        "tester/list": "[]",
        "tester/number": json.dumps({"id": 5, "sha": 5, "siblings": 5}),
        "tester/names": json.dumps({"id": "tester/names", "sha": sha, "siblings": [{}]}),
    }
    for name in ("tester/etag", "tester/good", *answers):
        hub.repository("models", name).commit({f"{name[7:]}.json": b"{}"})
    hub.etags = {"etag.json": '"../../../evil_etag"'}
    hub.answers = {name: text.encode() for name, text in answers.items()}
    before = set(command.folder.rglob("*evil*"))

    done = subprocess.run(
        [sys.executable, "-c", DOWNLOAD, "tester/good", "tester/etag", *answers],
        cwd=command.folder,
        env={**os.environ, **command.variables},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert errors.pop("tester/good") == ""
    assert "which would be the name of a file outside of the cache" in errors.pop("tester/etag")
    assert all("gave an answer about model 'tester/" in error for error in errors.values()), errors
    assert set(command.folder.rglob("*evil*")) == before


@pytest.mark.parametrize(
    ("endpoint", "environ", "is_refused"),
    [
        ("https://huggingface.co", {}, False),
        ("http://127.0.0.1:8000", {}, False),
        ("http://localhost", {}, False),
        ("http://[::1]:80", {}, False),
        ("http://mirror.example.org", {}, True),
        ("http://127.0.0.1.example.org", {}, True),
        ("http://10.0.0.1", {"REDCO_FLOW_INSECURE_HUB": "1"}, False),
        ("ftp://mirror.example.org", {}, True),
    ],
)
def test_plain_http_is_refused_but_on_this_machine(endpoint, environ, is_refused):
    if is_refused:
        with pytest.raises(UnsafeHub, match="REDCO_FLOW_INSECURE_HUB=1"):
            guard_downloads(endpoint, environ)
    else:
        guard_downloads(endpoint, environ)


def test_a_link_that_leads_out_of_the_cache_is_deleted_and_reported(tmp_path):
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "x").write_text("")
    (snapshot / "good").symlink_to("../../blobs/x")
    (snapshot / "evil").symlink_to("../../../elsewhere")

    with pytest.raises(UnsafeHub, match="elsewhere"):
        check_inside(snapshot, cache)

    assert [path.name for path in snapshot.iterdir()] == ["good"]
    check_inside(snapshot, cache)


def test_a_file_may_be_in_the_store_that_repositories_share(tmp_path):
    """huggingface_hub moves a complete file of Xet storage there, in the middle of a download."""
    store = pytest.importorskip("huggingface_hub.utils._shared_blobs")
    content, digest = b"weights" * 1000, "a" * 64
    blob = tmp_path / "models--a--b" / "blobs" / "x"
    pointer = tmp_path / "models--a--b" / "snapshots" / "1" / "model.safetensors"
    for folder in (blob.parent, pointer.parent):
        folder.mkdir(parents=True)
    blob.write_bytes(content)
    before = hub_module._num_bytes(tmp_path / "models--a--b")

    is_shared = store.publish_blob_to_shared_store(
        blob_path=str(blob),
        xet_hash=digest,
        cache_dir=str(tmp_path),
        expected_size=len(content),
        replace_existing=False,
    )
    pointer.symlink_to("../../blobs/x")

    assert is_shared
    assert blob.is_symlink()
    assert hub_module._num_bytes(tmp_path / "models--a--b") > before
    check_inside(pointer.parent, tmp_path / "models--a--b", tmp_path / hub_module._SHARED_BLOBS)
    with pytest.raises(UnsafeHub):
        check_inside(pointer.parent, tmp_path / "models--a--b")


@pytest.mark.parametrize(("method", "is_refused"), [("GET", False), ("HEAD", True)])
def test_an_etag_with_slashes_is_refused_only_where_it_becomes_a_name(method, is_refused):
    """The hub's API sends ETags in Base64: `W/"1a2-h5/Zk+…"`."""
    request = httpx.Request(method, "https://hub.example.org/api/models/a/b")
    answer = httpx.Response(200, headers={"ETag": 'W/"1a2-h5/Zk+q"'}, request=request)
    expected = pytest.raises(UnsafeHub, match="ETag") if is_refused else nullcontext()

    with expected:
        _check_answer(answer)

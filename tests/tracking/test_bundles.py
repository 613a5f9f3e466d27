"""Bundles: what another workspace gets is what was published, or nothing."""

import io
import json
import tarfile

import pytest

from redco_flow.errors import ArtifactError
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.bundles import contents_of, read_bundle, write_bundle
from redco_flow.tracking.deletions import refuse_deleted
from redco_flow.tracking.lineage import trace
from redco_flow.tracking.results import find_result
from redco_flow.tracking.workspace import Workspace
from tests.tracking.test_lineage import demo as demo


@pytest.fixture
def bundle(demo, workspace, tmp_path):
    path = tmp_path / "demo.tar"
    contents = contents_of(workspace, [demo.store.get(demo.metrics)])
    write_bundle(path, workspace, contents, command="bundle")
    return path


@pytest.fixture
def other(tmp_path):
    return Workspace.open(tmp_path / "other")


def test_artifacts_and_results_are_reused_and_traced_in_another_workspace(
    bundle,
    demo,
    workspace,
    other,
):
    read_bundle(bundle, other)
    read_bundle(bundle, other)  # is there already

    store = ArtifactStore(other)
    ids = {demo.dataset, demo.best, demo.predictions, demo.metrics}
    assert {one.id for one in store.list()} == ids
    assert not [problem for one in ids for problem in store.verify(one)]
    leaves = [{(leaf.type, leaf.name, leaf.id) for leaf in trace(one, demo.metrics).leaves()}
              for one in (workspace, other)]  # fmt: skip
    assert leaves[0] == leaves[1] != set()
    reused = {name: find_result(other, one.fingerprint) is not None
              for name, one in demo.pipeline.results.items()}  # fmt: skip
    # The stage has a second checkpoint, which is not in the lineage of these metrics.
    assert reused == {"preprocess": True, "train": False, "predict": True, "evaluate": True}


def test_without_inputs_the_lineage_is_there_and_the_bytes_are_not(
    demo,
    workspace,
    other,
    tmp_path,
):
    contents = contents_of(workspace, [demo.store.get(demo.best)], with_inputs=False)
    write_bundle(tmp_path / "best.tar", workspace, contents, command="bundle best")

    read_bundle(tmp_path / "best.tar", other)

    store = ArtifactStore(other)
    assert [one.id for one in store.list() if store.is_whole(one.id)] == [demo.best]
    assert {leaf.name for leaf in trace(other, demo.best).leaves()} == {"train.csv", "test.csv"}
    with pytest.raises(ArtifactError, match=r"deleted .* by .*bundle best"):
        refuse_deleted(other, store.get(demo.dataset))


def changed(path, change):
    """A copy of the tar file, each of whose members (name, content) goes through `change`."""
    target = path.with_name("changed.tar")
    with tarfile.open(path) as source, tarfile.open(target, "w") as tar:
        for member in source:
            found = change(member.name, source.extractfile(member).read())
            for name, content in [found] if isinstance(found, tuple) else found:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return target


def other_bytes(name, content):
    return name, b"rowz" if content == b"rows" else content


def other_settings(name, content):
    if not name.startswith("results/"):
        return name, content
    record = json.loads(content)
    record["ingredients"]["settings"]["added"] = 1
    return name, json.dumps(record).encode()


def other_digest(name, content):
    """The file and its digest in the manifest are changed together."""
    return name, content.replace(b"demo", b"demx") if name.endswith("manifest.json") else content


def outside(name, content):
    return ("../outside", content) if name == "bundle.json" else (name, content)


def more(name, content):
    is_manifest = name.endswith("manifest.json")
    added = [(name.replace("manifest.json", "files/added"), b"x")] if is_manifest else []
    return [(name, content), *added]


def less(name, content):
    return [] if content == b"scores" else (name, content)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_bytes, "has another digest"),
        (other_settings, "has another fingerprint"),
        (outside, "which no bundle has"),
        (more, "has added, which its manifest has not"),
        (less, "lacks output.txt"),
    ],
)
def test_a_bundle_with_a_wrong_digest_or_file_leaves_the_workspace_as_it_was(
    bundle, other, change, why
):
    with pytest.raises(ArtifactError, match=why):
        read_bundle(changed(bundle, change), other)

    assert ArtifactStore(other).list() == []
    assert not [*other.results.glob("*.json"), *other.artifacts.glob("*"), *other.root.glob("out*")]


def test_a_cut_bundle_and_a_damaged_artifact_are_refused(bundle, demo, other, tmp_path):
    cut = tmp_path / "cut.tar"
    cut.write_bytes(bundle.read_bytes()[:-20_000])
    with pytest.raises(ArtifactError, match=r"not a whole one|lacks"):
        read_bundle(cut, other)
    path = demo.store.get(demo.dataset).path / "output.txt"
    path.chmod(0o644)
    path.write_text("rowz")

    contents = contents_of(demo.pipeline.workspace, [demo.store.get(demo.metrics)])
    with pytest.raises(ArtifactError, match="nothing was written"):
        write_bundle(tmp_path / "new.tar", demo.pipeline.workspace, contents, command="bundle")

    assert not [*tmp_path.glob("*new.tar*")]

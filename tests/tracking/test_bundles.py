"""Bundles: what another workspace gets is what was published, or nothing."""

import io
import json
import tarfile
from dataclasses import replace

import pytest
from blake3 import blake3

from redco_flow.errors import ArtifactError
from redco_flow.records import digest_json
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.bundles import contents_of, read_bundle, write_bundle
from redco_flow.tracking.deletions import refuse_deleted
from redco_flow.tracking.lineage import trace
from redco_flow.tracking.results import find_result, fingerprint, publish_result, read_result
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


def rewritten(path, change, *, is_signed):
    """A copy of the tar file whose members, by name, went through `change`.

    Args:
        is_signed: whether the digests in bundle.json are made for what it has now.
    """
    with tarfile.open(path) as source:
        members = {one.name: source.extractfile(one).read() for one in source}
    change(members)
    if is_signed:
        index = json.loads(members["bundle.json"])
        del index["digest"]
        index["digests"] = {one: blake3(members[one]).hexdigest() for one in index["digests"]}
        members["bundle.json"] = json.dumps({**index, "digest": digest_json(index)}).encode()
    target = path.with_name("changed.tar")
    with tarfile.open(target, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return target


def edit(members, ending, key, value):
    """Change a key of the first JSON record whose name ends so."""
    name = next(one for one in members if one.endswith(ending))
    members[name] = json.dumps(json.loads(members[name]) | {key: value}).encode()


def other_bytes(members):
    name = next(name for name, content in members.items() if content == b"rows")
    members[name] = b"rowz"


def other_metric(members):
    name = next(name for name in members if b"rougeL" in members[name])
    members[name] = members[name].replace(b"0.4", b"0.9")


def other_ingredients(members):
    edit(members, next(name for name in members if name.startswith("results/")), "ingredients", {})


def other_manifest(members):
    edit(members, "manifest.json", "kind", "checkpoint")


def other_pipeline(members):
    edit(members, next(name for name in members if name.startswith("results/")), "pipeline", "../x")


def outside(members):
    members["artifacts/../../outside"] = b"x"


def current(members):
    members["."] = b"x"


def more(members):
    name = next(name for name in members if name.endswith("manifest.json"))
    members[name.replace("manifest.json", "files/added")] = b"x"


def less(members):
    del members[next(name for name, content in members.items() if content == b"scores")]


@pytest.mark.parametrize(
    ("change", "why", "is_signed"),
    [
        (other_bytes, "has another digest", False),
        (other_metric, "has another digest", False),
        (other_ingredients, "has another fingerprint", True),
        (other_manifest, "is not what was published", True),
        (other_pipeline, "pipeline name", True),
        (outside, "unexpected member", False),
        (current, "unexpected member", False),
        (more, "unexpected member", True),
        (less, "is missing", True),
    ],
)
def test_a_bundle_with_a_wrong_digest_or_file_leaves_the_workspace_as_it_was(
    bundle, other, change, why, is_signed
):
    with pytest.raises(ArtifactError, match=why):
        read_bundle(rewritten(bundle, change, is_signed=is_signed), other)

    assert ArtifactStore(other).list() == []
    assert not [*other.results.glob("*.json"), *other.artifacts.glob("*"), *other.root.glob("out*")]
    assert not [*other.artifacts.glob(".*")]


def test_a_record_without_files_takes_none_from_the_bundle(demo, workspace, other, tmp_path):
    path = tmp_path / "best.tar"
    contents = contents_of(workspace, [demo.store.get(demo.best)], with_inputs=False)
    write_bundle(path, workspace, contents, command="bundle best")

    def with_files(members):
        members[f"artifacts/{demo.dataset}/files/output.txt"] = b"rowz"

    with pytest.raises(ArtifactError, match="unexpected member"):
        read_bundle(rewritten(path, with_files, is_signed=True), other)


def test_a_workspaces_own_result_of_the_same_fingerprint_is_kept(bundle, demo, other):
    theirs = demo.pipeline.results["evaluate"]
    publish_result(other, replace(theirs, outputs={"metrics": "1" * 64}, host="here"))

    contents = read_bundle(bundle, other)

    assert contents.left_out == ["evaluate"]
    assert read_result(other, theirs.fingerprint).host == "here"
    node = trace(other, demo.metrics)
    assert (node.production.host, node.production.run) == ("login-1", demo.run.id)


def test_a_runs_bundle_has_its_own_results_although_others_published_its_artifacts(
    demo, workspace, other, tmp_path
):
    again = replace(
        demo.pipeline.results["preprocess"],
        ingredients=demo.pipeline.results["preprocess"].ingredients | {"code": {"m": "5" * 64}},
    )
    again = replace(again, fingerprint=fingerprint(again.ingredients))
    publish_result(workspace, again)
    contents = contents_of(workspace, [demo.store.get(demo.dataset)], [again])
    write_bundle(tmp_path / "run.tar", workspace, contents, command="bundle run")

    read_bundle(tmp_path / "run.tar", other)

    assert find_result(other, again.fingerprint) is not None


def test_a_cut_bundle_and_a_damaged_artifact_are_refused(bundle, demo, other, tmp_path):
    cut = tmp_path / "cut.tar"
    cut.write_bytes(bundle.read_bytes()[:-20_000])
    with pytest.raises(ArtifactError, match=r"is incomplete|missing"):
        read_bundle(cut, other)
    path = demo.store.get(demo.dataset).path / "output.txt"
    path.chmod(0o644)
    path.write_text("rowz")

    contents = contents_of(demo.pipeline.workspace, [demo.store.get(demo.metrics)])
    with pytest.raises(ArtifactError, match="nothing was written"):
        write_bundle(tmp_path / "new.tar", demo.pipeline.workspace, contents, command="bundle")

    assert not [*tmp_path.glob("*new.tar*")]
    path.unlink()  # without a record of a deletion
    with pytest.raises(ArtifactError, match="nothing was written"):
        write_bundle(tmp_path / "new.tar", demo.pipeline.workspace, contents, command="bundle")

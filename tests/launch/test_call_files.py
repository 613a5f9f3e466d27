"""A call for another host: its paths are that host's, and what decides the result is untouched."""

import json
from dataclasses import replace
from pathlib import Path

from tiny_stages.calls import make_call

from redco_flow.launch.call import Call
from redco_flow.launch.hosts.call_files import collect_inputs, rewrite_paths
from redco_flow.stages.script.config import Config
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.workspace import Workspace

FAR = Workspace(Path("/far/workspace"))


def test_inputs_lie_in_the_other_workspace_and_the_fingerprint_stays(tmp_path):
    workspace = Workspace.open(tmp_path / "workspace")
    source = tmp_path / "text.txt"
    source.write_text("input")
    artifact = ArtifactStore(workspace).publish("dataset", source)
    call = make_call(workspace.root, inputs=[artifact])

    files = collect_inputs(call, workspace)
    there = rewrite_paths(call, files, FAR)

    (reference,) = there.inputs["dataset"]
    assert reference.path == f"/far/workspace/artifacts/dataset/{artifact.id[:16]}/files"
    assert there.workspace == "/far/workspace"
    assert (there.fingerprint, there.ingredients, there.config) == (
        call.fingerprint,
        call.ingredients,
        call.config,
    )
    assert [path.read_text() for path in files.sources.values()] == ["input"]


def test_raw_data_travels_by_content_and_the_config_names_where_it_arrives(tmp_path):
    workspace = Workspace.open(tmp_path / "workspace")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"source": "a", "target": "b"}) + "\n")
    call = preprocess_call(workspace, rows)

    files = collect_inputs(call, workspace)
    there = rewrite_paths(call, files, FAR)

    (one,) = files.sets
    arrived = f"{FAR.cache}/data/{one.name}{rows}"
    assert there.config["data"]["train"] == arrived
    assert there.config["data"] | {"train": None} == call.config["data"] | {"train": None}
    rows.write_text(json.dumps({"source": "a", "target": "c"}) + "\n")
    assert collect_inputs(call, workspace).sets[0].name != one.name


def preprocess_call(workspace, rows):
    from redco_flow.stages.preprocess.config import Config

    config = Config.from_json(
        {
            "data": {"train": str(rows), "tokenizer": {"train": {"vocab_size": 290}}},
            "max_source_length": 8,
            "max_target_length": 8,
            "model": {"family": "t5"},
            "recipe": "text_to_text",
        }
    )
    return Call(
        run="run-abcdef",
        pipeline="tiny",
        stage="preprocess",
        kind="preprocess",
        attempt=1,
        config=config.model_dump(mode="json"),
        inputs={},
        fingerprint="0" * 64,
        ingredients={},
        workspace=str(workspace.root),
    )


def test_a_script_travels_with_the_modules_beside_it(tmp_path):
    workspace = Workspace.open(tmp_path / "workspace")
    for name, source in {"fit.py": "import line\n", "line.py": "", "other.py": ""}.items():
        (tmp_path / name).write_text(source)
    settings = Config(path=str(tmp_path / "fit.py")).model_dump(mode="json")
    call = replace(preprocess_call(workspace, tmp_path), kind="script", config=settings)

    files = collect_inputs(call, workspace)
    there = rewrite_paths(call, files, FAR)

    (one,) = files.sets
    assert [Path(entry.path).name for entry in one.files] == ["fit.py", "line.py"]
    assert there.config["path"] == f"{FAR.cache}/data/{one.name}{tmp_path}/fit.py"

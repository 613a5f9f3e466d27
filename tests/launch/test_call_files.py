"""A call for another host: its paths are that host's, and what decides the result is untouched."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_stages.calls import make_call

from redco_flow.errors import UsageError
from redco_flow.launch.call import Call
from redco_flow.launch.hosts.call_files import collect_inputs, rewrite_paths
from redco_flow.stages.preprocess import config as preprocess_config
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


def image_call(workspace, data):
    recipe = {"recipe": "image_classification", "settings": {"image_size": 4, "num_channels": 1}}
    config = preprocess_config.Config.from_json(recipe | {"data": data}).model_dump(mode="json")
    return replace(preprocess_call(workspace, Path("rows.jsonl")), config=config)


def write_rows(file, paths):
    rows = [{"image": {"bytes": None, "path": path}, "label": "a"} for path in paths]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_images_that_rows_name_travel_and_are_found_from_the_data_file(tmp_path):
    workspace = Workspace.open(tmp_path / "workspace")
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "1.png").write_bytes(b"one")
    (folder / "link.png").symlink_to(folder / "images" / "1.png")
    (tmp_path / "private.png").write_bytes(b"private")
    names = ["images/1.png", "link.png", "images/../images/1.png", "missing.png", "../private.png"]
    write_rows(folder / "rows.jsonl", names)
    call = image_call(workspace, {"train": str(folder / "rows.jsonl")})

    files = collect_inputs(call, workspace)
    there = rewrite_paths(call, files, FAR)

    (one,) = files.sets
    root = str(folder).lstrip("/")
    arrived = [f"{root}/{name}" for name in ("images/1.png", "link.png", "rows.jsonl")]
    assert [entry.path for entry in one.files] == arrived
    assert there.config["data"]["train"] == f"{FAR.cache}/data/{one.name}{folder}/rows.jsonl"
    assert {path.read_bytes() for path in files.sources.values()} == {
        b"one",
        (folder / "rows.jsonl").read_bytes(),
    }
    (folder / "images" / "1.png").write_bytes(b"other")
    assert collect_inputs(call, workspace).sets[0].name != one.name


def test_absolute_paths_of_images_are_refused_for_another_host(tmp_path):
    workspace = Workspace.open(tmp_path / "workspace")
    (tmp_path / "1.png").write_bytes(b"one")
    write_rows(tmp_path / "rows.jsonl", [str(tmp_path / "1.png")])

    with pytest.raises(UsageError, match=r"rows\.jsonl: a row names .*1\.png, and absolute paths"):
        collect_inputs(image_call(workspace, {"train": str(tmp_path / "rows.jsonl")}), workspace)


def test_texts_that_are_spelled_like_a_folder_stay_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workspace = Workspace.open(tmp_path / "workspace")
    (tmp_path / "test").mkdir()
    for name in ("train", "test"):
        (tmp_path / "test" / f"{name}.csv").write_text("source.target\na.b\n")
    others = {"splits": {"validation": "test", "test": "none"}, "csv": {"delimiter": "."}}
    config = preprocess_call(workspace, Path("rows.jsonl")).config
    data = config["data"] | {"train": None, "dataset": "test", "source_prefix": "test/"} | others
    call = replace(preprocess_call(workspace, Path("rows.jsonl")), config=config | {"data": data})

    files = collect_inputs(call, workspace)
    there = rewrite_paths(call, files, FAR)

    moved = f"{FAR.cache}/data/{files.data_name}{tmp_path}/test"
    assert there.config["data"] == call.config["data"] | {"dataset": moved}

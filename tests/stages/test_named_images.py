"""Image files that rows name by path are in the fingerprint of their dataset: exactly those."""

import gzip
import io
import json
import os
import sys

import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from stage_kinds import preprocess

from redco_flow.orchestrate.run.ingredients import Sources, stage_ingredients
from redco_flow.spec.load import load_pipeline
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.data.guard import DataChanged
from redco_flow.stages.data.named_images import named_images
from redco_flow.tracking.workspace import Workspace

RECIPE = {"recipe": "image_classification", "settings": {"image_size": 4, "num_channels": 1}}


def png(value):
    file = io.BytesIO()
    Image.new("L", (4, 4), value).save(file, "PNG")
    return file.getvalue()


def rows_of(paths):
    return [{"image": {"bytes": None, "path": path}, "label": "a", "note": "x"} for path in paths]


def as_jsonl(file, rows):
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def as_gzip(file, rows):
    file.write_bytes(gzip.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode()))


def as_parquet(file, rows):
    pa.parquet.write_table(pa.Table.from_pylist(rows), file, row_group_size=2)


def as_arrow(file, rows):
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)


WRITERS = {
    "rows.jsonl": as_jsonl,
    "rows.jsonl.gz": as_gzip,
    "rows.json": lambda file, rows: file.write_text(json.dumps(rows)),
    "rows.parquet": as_parquet,
    "rows.arrow": as_arrow,
}


@pytest.fixture
def folder(bench):
    """A folder of images, beside a private one."""
    folder = bench.root / "data"
    (folder / "images").mkdir(parents=True)
    for number in range(6):
        (folder / "images" / f"{number}.png").write_bytes(png(number))
    (folder / "link.png").symlink_to(folder / "images" / "5.png")
    (bench.root / "private.png").write_bytes(png(9))
    os.mkfifo(folder / "pipe.png")
    return folder


GOOD = ["images/0.png", "images/1.png", "images/../images/2.png", "link.png"]
REFUSED = [
    "missing.png",
    "pipe.png",
    "../private.png",
    "/dev/zero",
    "images",
    "a\0b.png",
    "a\0/b.png",
]


class Opened:
    """The images that this process opens while it is on; an audit hook cannot be removed."""

    def __init__(self):
        self.is_on, self.paths = False, set()
        sys.addaudithook(self)

    def __call__(self, event, arguments):
        if self.is_on and event == "open" and str(arguments[0]).endswith(".png"):
            self.paths.add(str(arguments[0]))


@pytest.mark.parametrize("name", WRITERS)
def test_the_files_of_the_fingerprint_are_those_that_preprocessing_reads(bench, folder, name):
    WRITERS[name](folder / name, rows_of(GOOD + REFUSED))
    data = {"train": str(folder / name), "validation_fraction": 0.0, "on_bad_row": "skip"}
    config = preprocess.Config.from_json(RECIPE | {"data": data})

    opened = Opened()
    opened.is_on = True
    bench.run(preprocess, RECIPE | {"data": data})
    opened.is_on = False

    (named,) = preprocess.named_files(config).values()
    found = {str(one.real) for one in named.values() if one}
    assert found == opened.paths - {str(folder / "pipe.png"), str(folder / "missing.png")}
    assert {path for path, one in named.items() if one} == set(GOOD)
    assert {path for path, one in named.items() if not one} == set(REFUSED)


def data_ingredients(bench, data, *overrides):
    file = bench.root / "pipeline.yaml"
    stages = {"preprocess": {}}
    file.write_text(json.dumps({"name": "pictures", **RECIPE, "data": data, "stages": stages}))
    stage = load_pipeline(file, overrides).stages["preprocess"]
    return stage_ingredients(stage, {}, Workspace(bench.root / "workspace"), Sources())["data"]


@pytest.mark.parametrize("name", WRITERS)
def test_another_image_behind_a_named_path_is_another_dataset(bench, folder, name):
    WRITERS[name](folder / name, rows_of([*GOOD, "missing.png"]))
    data = {"train": str(folder / name)}

    first = data_ingredients(bench, data)
    assert set(first) == {name, f"images named by {name}"}

    (folder / "images" / "4.png").write_bytes(png(44))  # no row names it
    assert data_ingredients(bench, data) == first
    (folder / "images" / "1.png").write_bytes(png(11))
    second = data_ingredients(bench, data)
    assert second[name] == first[name]
    assert second != first
    (folder / "missing.png").write_bytes(png(3))
    assert data_ingredients(bench, data) not in (first, second)


def test_images_of_a_dataset_folder_stay_the_same_where_the_folder_is_moved(bench, folder):
    as_jsonl(folder / "train.jsonl", rows_of(GOOD))
    first = data_ingredients(bench, {"dataset": str(folder)})

    folder.rename(bench.root / "moved")
    (bench.root / "moved" / "link.png").unlink()
    (bench.root / "moved" / "link.png").symlink_to("images/5.png")

    assert data_ingredients(bench, {"dataset": str(bench.root / "moved")}) == first
    assert "images named by train.jsonl" in first


def test_images_whose_bytes_are_in_the_file_are_not_looked_for(bench, folder):
    rows = rows_of(GOOD)
    for row in rows[:3]:
        row["image"]["bytes"] = png(1)
    as_parquet(folder / "rows.parquet", rows)
    config = preprocess.Config.from_json(RECIPE | {"data": {"train": str(folder / "rows.parquet")}})

    (named,) = preprocess.named_files(config).values()

    assert list(named) == ["link.png"]


def test_a_change_of_an_image_after_the_plan_is_an_error(bench, folder):
    as_jsonl(folder / "rows.jsonl", rows_of(GOOD))
    data = {"train": str(folder / "rows.jsonl"), "validation_fraction": 0.0}
    planned = {"ingredients": {"data": data_ingredients(bench, data)}}

    made = bench.run(preprocess, RECIPE | {"data": data}, provenance=planned)
    (folder / "images" / "1.png").write_bytes(png(11))

    assert len(DatasetArtifact(made["dataset"].path).split("train")) == len(GOOD)
    with pytest.raises(DataChanged, match=r"^an image named in .*rows\.jsonl: changed since"):
        bench.run(preprocess, RECIPE | {"data": data}, provenance=planned)


def test_the_paths_of_a_file_are_remembered_and_read_again_when_it_changes(bench, folder):
    as_jsonl(folder / "rows.jsonl", rows_of(GOOD[:1]))
    workspace = Workspace.open(bench.root / "workspace")
    data = preprocess.Config.from_json(
        RECIPE | {"data": {"train": str(folder / "rows.jsonl")}}
    ).data

    def names():
        return [list(named) for named in named_images(data, ("image",), workspace).values()]

    assert names() == [GOOD[:1]]
    (record,) = (workspace.cache / "images").glob("*-paths.json")
    record.write_text('["images/3.png"]')
    assert names() == [["images/3.png"]]
    as_jsonl(folder / "rows.jsonl", rows_of(GOOD))
    assert names() == [GOOD]


def test_a_path_that_is_not_text_names_no_file(bench, folder):
    (folder / "rows.jsonl").write_text(r"""{"image": {"bytes": null, "path": "\ud800/1.png"}}""")
    (named,) = named_images(
        preprocess.Config.from_json(RECIPE | {"data": {"train": str(folder / "rows.jsonl")}}).data,
        None,
        Workspace.open(bench.root / "workspace"),
    ).values()

    assert list(named.items()) == [("\ud800/1.png", None)]
    assert data_ingredients(bench, {"train": str(folder / "rows.jsonl")})


def test_rows_beyond_max_examples_do_not_count(bench, folder):
    as_jsonl(folder / "rows.jsonl", rows_of(GOOD))
    data = {"train": str(folder / "rows.jsonl")}
    first = data_ingredients(bench, data, "data.max_examples=1")

    (folder / "images" / "1.png").write_bytes(png(11))

    assert data_ingredients(bench, data, "data.max_examples=1") == first
    assert data_ingredients(bench, data) != first

import re

import pytest

from redco_flow.orchestrate.sweep.logged_metric import LoggedMetric
from redco_flow.records import write_json
from redco_flow.tracking.planned_fits import write_fits


def test_the_page_begins_with_the_run_and_how_it_ended(builder, read_report):
    page = read_report(builder.whole())

    assert f"redco-flow run {builder.run.id} ✓ completed" in page.text
    assert "stages completed" not in page.text
    for fact in ("2026-01-31 12:00:00 UTC", "4\u2009min 10\u2009s", "pipelines/demo.yaml", "local"):
        assert fact in page.html
    assert "redco-flow run pipelines/demo.yaml num_epochs=3" in page.text
    assert "commit c0ffeec0ffee, with changes" in page.text


def test_parts_come_in_the_order_in_which_a_researcher_asks(builder, read_report):
    page = read_report(builder.whole())

    ids = [one["id"] for one in page.all("section") if "id" in one]
    assert ids == [
        "metrics",
        "time",
        "training",
        "samples",
        "stages",
        "lineage",
        "environment",
        "reproduce",
    ]


def test_the_page_needs_nothing_but_itself(builder, read_report):
    page = read_report(builder.whole())

    assert not {"img", "iframe", "object", "embed"} & {tag for tag, _ in page.tags}
    assert [one["href"] for one in page.all("link")] == ["data:,"]
    (policy,) = (one["content"] for one in page.all("meta") if "http-equiv" in one)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; ")
    assert len(re.findall(r"'sha256-[\w+/]{43}='", policy)) == 2
    assert "unsafe-eval" not in policy
    assert not any("src" in one for one in page.all("script"))
    style = page.html[: page.html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    links = [one["href"] or "" for one in page.all("a")]
    assert all(link.startswith("#") or link.endswith("rank0.log") for link in links)


def test_every_link_inside_the_page_leads_somewhere(builder, read_report):
    page = read_report(builder.whole())

    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    targets = [one["href"][1:] for one in page.all("a") if one["href"].startswith("#")]
    assert len(ids) == len(set(ids))
    assert set(targets) <= set(ids)


def test_links_to_logs_lead_to_files_beside_the_page(builder, read_report):
    run = builder.whole()

    page = read_report(run)

    logs = [one["href"] for one in page.all("a") if one["href"].endswith(".log")]
    assert len(logs) == 4
    assert all((run.path / log).is_file() for log in logs)


def test_charts_show_training_and_evaluation_by_step(builder, read_report):
    page = read_report(builder.whole())

    assert [name.partition(" over ")[0] for name in page.charts] == [
        "Loss",
        "val/rouge1, val/rougeL, val/rouge2",
        "Learning rate",
        "Gradient norm",
        "Speed",
    ]
    loss = page.plots[0]
    assert loss["layout"]["yaxis"]["title"]["text"] == "loss (nats per target token)"
    assert [trace["name"] for trace in loss["data"]] == ["training", "validation"]
    assert "Nothing is smoothed" in page.text


def test_metrics_of_different_sizes_have_charts_of_their_own(builder, read_report):
    dataset = builder.preprocess()["dataset"]
    measured = [{"rouge2": 20.0 + step, "fraction": 0.5 + step / 100} for step in (10, 20)]
    records = [{"step": 10, "loss": 1.0}, *({"step": 9, "metrics": one} for one in measured)]
    builder.train(dataset, records=records)

    page = read_report(builder.close())

    assert [name.partition(" over ")[0] for name in page.charts] == [
        "Loss",
        "val/rouge2",
        "val/fraction",
    ]


def test_what_a_loss_function_measures_has_charts_and_columns_of_its_own(builder, read_report):
    dataset = builder.preprocess()["dataset"]
    records = [
        {
            "kind": "training",
            "step": step,
            "total_steps": 30,
            "epoch": step / 30,
            "loss": 2.0,
            "grad_norm": 1.0,
            "num_skipped": 0,
            "load_balancing_loss": 1.0 + step / 100,
            "margin": -step / 10,
        }
        for step in (10, 20, 30)
    ]
    builder.train(dataset, records=records)

    page = read_report(builder.close())

    assert [name.partition(" over ")[0] for name in page.charts] == [
        "Loss",
        "Load balancing loss",
        "Margin",
        "Gradient norm",
    ]
    assert [page.plots[number]["data"][0]["y"][-1] for number in (1, 2)] == [1.3, -3.0]
    assert page.text.count("Measured with the training loss") == 2


def test_what_a_trainings_time_went_into_is_told_and_adds_up(builder, read_report):
    dataset = builder.preprocess()["dataset"]
    begun = {"kind": "start", "start_step": 0}
    begun |= {key: f"2026-01-31T12:00:{second}+00:00" for key, second in (
        ("process_started_at", "00"), ("time", "10"),
    )}  # fmt: skip
    step = {"kind": "training", "step": 5, "loss": 1.0, "steps_seconds": 15.0}
    builder.train(dataset, records=[begun, {**step, "time": "2026-01-31T12:00:30+00:00"}])
    (attempt,) = builder.run.attempts("train")
    attempt.exit_path.unlink(missing_ok=True)

    page = read_report(builder.close())

    assert "goodput 50.0% of 30\u2009s" in page.text.replace(" s ", "\u2009s ")
    assert "steps 15.00 50.0%" in page.text
    assert "starting 15.00 50.0%" in page.text
    assert "all 30.00 100.0%" in page.text


def test_a_profile_is_linked_from_its_stage(builder, read_report):
    dataset = builder.preprocess()["dataset"]
    builder.train(dataset)
    (attempt,) = builder.run.attempts("train")
    attempt.profile_path.mkdir()

    page = read_report(builder.close())

    (link,) = (one["href"] for one in page.all("a") if (one["href"] or "").endswith("/profile"))
    assert builder.run.path / link == attempt.profile_path


def test_how_well_devices_are_used_is_told_with_the_training(builder, read_report):
    dataset = builder.preprocess()["dataset"]
    records = [
        {
            "step": step,
            "loss": 1.0,
            "tflops_per_device": 400.0 + step,
            "mfu": share,
            "peak_memory_bytes": step * 2**30,
        }
        for step, share in ((1, 0.40), (2, 0.41), (3, 0.50))
    ]
    builder.train(dataset, records=records)

    page = read_report(builder.close())

    assert "TFLOP/s per device 402.0, MFU 41.0% (median)" in page.text
    assert "tflops per device mfu" in page.text
    assert "peak memory per device 3.0 GiB" in page.text


def test_a_trainings_prediction_is_shown_next_to_its_measurement(builder, read_report):
    builder.train(builder.preprocess()["dataset"])
    time = {"seconds": 0.4, "parts_seconds": {"products": 0.3, "launches": 0.1}}
    fit = {"device": "h100", "reported": "NVIDIA H100.*", "num_devices": 2, "step_time": time}
    fit |= {"used_bytes": 40 * 2**30, "parts_bytes": {"optimizer_state": 5 * 2**30}}
    fit |= {"device_facts": {}, "assumed": ["rows are as long as the settings allow"]}
    write_fits(builder.run, {"train": fit})
    progress = {"devices": "2 × NVIDIA H100 80GB HBM3", "step_seconds": 0.42}
    progress |= {"peak_memory_bytes": 38 * 2**30, "time": "2026-01-31T12:00:30+00:00"}
    write_json(builder.run.attempt("train", 1).progress_path, progress)

    page = read_report(builder.close())

    assert "step time 0.42 s, predicted 0.4 s (+5.0 %)" in page.text
    assert "memory per device 38 GiB, predicted 40 GiB (-5.0 %)" in page.text
    assert "predicted assuming rows are as long as the settings allow" in page.text
    times = "step time 0.4000 s 0.4200 s +5.0% products 0.3000 s – – launches 0.1000 s – –"
    sizes = "memory per device 40.00 GiB 38.00 GiB -5.0% optimizer state 5.000 GiB – –"
    assert times in page.text
    assert sizes in page.text


@pytest.mark.parametrize(
    ("recipe", "counted"),
    [
        ("text_to_text", "tokens"),
        ("text_to_image", "images"),
        ("classification", "texts"),
        ("python:mine", "examples"),
    ],
)
def test_speed_is_told_in_what_the_recipes_loss_counts(builder, read_report, recipe, counted):
    dataset = builder.preprocess()["dataset"]
    records = [{"step": step, "loss": 1.0, "tokens_per_second": 12.0} for step in (1, 2)]
    builder.train(dataset, records=records, settings={"recipe": recipe})

    page = read_report(builder.close())

    assert f"{counted} per second 12.00 (median)" in page.text
    assert f"loss {counted} per second 1" in page.text


def test_five_thousand_logged_points_make_no_large_file(builder, read_report):
    dataset = builder.preprocess()["dataset"]
    records = [
        {"step": s, "loss": 5.0 / s, "grad_norm": 1.0 + s % 7, "learning_rate": 1e-4 * s}
        for s in range(1, 5001)
    ]
    builder.train(dataset, records=records)

    page = read_report(builder.close())

    assert len(page.html) < 1_500_000  # of which the library that draws has 1.2 MB
    assert page.html.count("plotly.js (basic - minified)") == 1
    assert "Of 5,000 records the lowest and the highest of each stretch are drawn" in page.text


def test_every_stage_is_told_with_its_artifacts_and_log(builder, read_report):
    page = read_report(builder.whole())

    for stage, result in builder.results.items():
        assert stage in page.text
        for output, artifact_id in result.outputs.items():
            assert f"{output} {artifact_id[:12]}" in page.text
        assert f"stages/{stage}/attempts/1/logs/rank0.log" in [one["href"] for one in page.all("a")]


def test_a_reused_stage_shows_what_the_earlier_run_logged(builder, make_builder, read_report):
    builder.whole()
    again = make_builder()
    for stage, result in builder.results.items():
        again.reuse(stage, result)
    cut_short = {"kind": "training", "step": 1, "loss": 777.0}
    again.attempt("train", records=[cut_short])  # before the other run had its result

    page = read_report(again.close())
    watched = list(LoggedMetric("train", "train/loss", pytest.fail).read_new(again.run))

    assert f"Reused: these are the records of run {builder.run.id}." in page.text
    assert page.text.count(f"reused from {builder.run.id}") == 4
    log = f"../{builder.run.id}/stages/train/attempts/1/logs/rank0.log"
    assert log in [one["href"] for one in page.all("a")]
    assert (again.run.path / log).is_file()
    assert "18.75" in page.text
    assert "Blue Spice" in page.text
    assert watched
    assert 777.0 not in [one.value for one in watched]


def test_several_trainings_and_evaluations_stand_side_by_side(builder, read_report):
    dataset = builder.preprocess()["dataset"]
    for size in ("small", "large"):
        best = builder.train(dataset, stage=f"train_{size}")["checkpoint/best/rouge2"]
        rows = [{"row_id": "1", "source": "s", "prediction": f"by {size}", "references": ["r"]}]
        made = builder.predict(best, dataset, rows, stage=f"predict_{size}")["predictions"]
        metrics = {"rouge2": 10.0 + len(size)}
        builder.evaluate(made, [{"rouge2": 1.0}], metrics, stage=f"evaluate_{size}")

    page = read_report(builder.close())

    for size in ("small", "large"):
        for text in (f"Stage train_{size}", f"Stage evaluate_{size}", f"by {size}"):
            assert text in page.text
    assert len(page.charts) == 1 + 2 * 5
    overlaid = page.plots[0]["data"]
    assert [trace["name"] for trace in overlaid][::2] == ["train_small", "train_large"]


def test_lineage_goes_back_to_digests_of_data_and_places_of_settings(builder, read_report):
    page = read_report(builder.whole())

    assert f"train.csv blake3 {'1' * 64}" in page.text
    assert f"test.csv blake3 {'2' * 64}" in page.text
    assert "learning_rate 0.0001 pipelines/demo.yaml:12" in page.text
    assert "num_epochs 3 command line" in page.text
    assert "by stage train · attempt 1 · job train-1 · on node7" in page.text
    assert "shown above" in page.text  # the dataset is an input of train and of predict


def test_what_was_made_together_is_explained_once(builder, read_report):
    dataset = builder.preprocess()["dataset"]
    made = builder.train(dataset)
    for name, output in (("a", "checkpoint/last"), ("b", "checkpoint/best/rouge2")):
        builder.predict(made[output], dataset, [], stage=f"predict_{name}")

    page = read_report(builder.close())

    assert page.text.count("learning_rate 0.0001 pipelines/demo.yaml:12") == 1
    assert page.text.count("made together with this one") == 1
    assert made["checkpoint/last"][:12] in page.text
    assert made["checkpoint/best/rouge2"][:12] in page.text


def test_the_commands_reproduce_the_code_and_every_setting(builder, read_report):
    run = builder.whole()

    page = read_report(run)

    commands = page.text[page.text.rindex("$ git checkout") :]
    assert commands.startswith(
        f"$ git checkout {'c0ffee' * 6}beef $ git apply {run.patch_path} "
        f"$ redco-flow run {run.resolved_path} --profile local"
    )
    assert "name: demo stages: train: num_epochs: 3" in page.text  # resolved.yaml, whole
    assert "jax\xa00.11.0" in page.html.replace("&nbsp;", "\xa0")


def test_settings_of_the_profile_are_part_of_the_command(make_builder, read_report):
    builder = make_builder(overrides=["learning_rate=1", "profile.num_cpu_devices=4"])

    page = read_report(builder.whole())

    assert "--profile local profile.num_cpu_devices=4 In the directory" in page.text

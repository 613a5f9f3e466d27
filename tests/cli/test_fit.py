"""`plan --fit`: whether trainings fit devices that are not there, and settings that do."""

import html
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from redco_flow.records import digest_json, write_json
from redco_flow.tracking.calibrations import keep_calibration
from redco_flow.tracking.planned_fits import read_fits, write_fits
from redco_flow.tracking.run_directory import list_runs
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import Command, wait_for

pytestmark = pytest.mark.slow

LAYERS, WIDTH, FEED_FORWARD, VOCABULARY, LENGTH = 4, 512, 1536, 4096, 512
PIPELINE = f"""\
name: small
recipe: language_modeling
model:
  family: llama
  dtype: bfloat16
  config:
    hidden_size: {WIDTH}
    num_hidden_layers: {LAYERS}
    num_attention_heads: 8
    intermediate_size: {FEED_FORWARD}
    max_position_embeddings: {LENGTH}
    remat: none
data: {{train: texts.jsonl, text_key: text, tokenizer: {{train: {{vocab_size: {VOCABULARY}}}}}}}
stages:
  preprocess: {{max_target_length: {LENGTH}}}
  train:
    max_steps: 9
    global_batch_size: 8
    optimizer: adamw
    keep: {{last: 1}}
    batching: {{type: windows, window_length: {LENGTH}}}
"""
NUM_PARAMETERS = (
    LAYERS * (4 * WIDTH**2 + 3 * WIDTH * FEED_FORWARD + 2 * WIDTH) + 2 * VOCABULARY * WIDTH + WIDTH
)
# The same step without a pipeline, recipe or tokenizer: the compiler's own sum, the operations of
# its products, and the computations that add up the head's gradients of chunks.
INDEPENDENT = f"""
import json, re, sys
import jax, jax.numpy as jnp, optax
from redco_flow.engine.targets import read_target

target = read_target("a100-40gx1")
target.set_environment()
from redco_flow import Deployer, TrainingPlan
from redco_flow.engine.step.chunked_loss import chunked_cross_entropy
from redco_flow.engine.step.program import Program
from redco_flow.models.find import find_model

module = find_model("llama")
config = module.Config(dtype="bfloat16").updated(dict(
    hidden_size={WIDTH}, num_hidden_layers={LAYERS}, num_attention_heads=8, vocab_size={VOCABULARY},
    intermediate_size={FEED_FORWARD}, max_position_embeddings={LENGTH}, remat="none"))

def loss_fn(params, batch, rngs, is_training):
    hidden, head, _ = module.apply_before_head(config, params, batch["input_ids"])
    score = lambda head, hidden: module.score(config, head, hidden)
    return chunked_cross_entropy(score, head, hidden, batch["labels"])

row = jax.ShapeDtypeStruct((1, {LENGTH}), jnp.int32)
batch = dict(input_ids=row, labels=row)
plan = TrainingPlan(
    Deployer(devices=target.find_devices()), loss_fn=loss_fn, params=module.abstract_params(config),
    optimizer=optax.adamw(1e-4), global_batch_size=1024, per_device_batch_size=int(sys.argv[1]),
    max_grad_norm=1.0, batch=batch)
compiled = plan.compile()
found, program = compiled.memory_analysis(), compiled.as_text()
added = re.compile(r"= f32\\[(1,1,)?{WIDTH},{VOCABULARY}\\]\\S* add\\(")
adding = [
    each
    for each in re.split(r"\\n}}\\n", program)
    if any(added.search(line) and "/jvp()/while/body/" in line for line in each.splitlines())
]
print(json.dumps(dict(
    used_bytes=found.argument_size_in_bytes + found.temp_size_in_bytes,
    flops=Program(program).flops(), adding=[" dot(" in each for each in adding])))
"""


def needs(*modules):
    def is_there(module):
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            return False

    missing = [module for module in modules if not is_there(module)]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


compiles_for_gpus = needs("jax_plugins.xla_cuda13", "nvidia.cu13")


@pytest.fixture
def command(tmp_path):
    (tmp_path / "small.yaml").write_text(PIPELINE)
    (tmp_path / "texts.jsonl").write_text('{"text": "a text"}\n')
    return Command(tmp_path)


@compiles_for_gpus
@pytest.mark.usefixtures("kernel_cache")
def test_what_does_not_fit_leads_to_settings_that_do_with_the_compilers_own_figures(command):
    (command.folder / "one.yaml").write_text("{executor: slurm, slurm: {gpu_type: a100-40g}}")
    settings = ("stages.train.resources.gpus_per_host=1", "global_batch_size=1024")
    words = ("plan", "small.yaml", "-p", "one.yaml", *settings)

    refused = command.start(*words, "--fit", "--json")
    out, err = refused.communicate(timeout=1800)
    fit = json.loads(out)["fit"]["train"]

    assert refused.returncode == 3, err
    assert fit["used_bytes"] > fit["limit_bytes"] == int(0.92 * 39.4 * 2**30)
    parts = fit["parts_bytes"]
    assert fit["num_parameters"] == fit["num_trained"] == NUM_PARAMETERS
    assert parts["parameters"] == fit["gradients_bytes"] == 4 * NUM_PARAMETERS
    assert parts["optimizer_state"] == pytest.approx(8 * NUM_PARAMETERS, abs=64)
    assert fit["checkpoint_bytes"] == pytest.approx(12 * NUM_PARAMETERS, abs=64)
    assert fit["used_bytes"] == sum(parts.values())
    products = NUM_PARAMETERS - VOCABULARY * WIDTH - (2 * LAYERS + 1) * WIDTH
    scores = 2 * LAYERS * WIDTH * LENGTH
    tokens = 1024 * LENGTH
    assert fit["model_flops_per_step"] == 6 * (products + scores) * tokens
    # The compiler computes some anew where a program is larger than the device.
    most = 8 * (products + 2 * scores) * tokens
    assert 6 * products * tokens <= fit["program_flops_per_device"] <= most
    assert fit["num_steps"] == 9
    time = fit["step_time"]
    assert {"products", "attention", "other kernels"} <= time["parts_seconds"].keys()
    # An A100 cannot be faster than its 312 TFLOP/s.
    fastest = fit["program_flops_per_device"] / 312e12
    assert fastest < time["least_seconds"] < time["seconds"] < time["most_seconds"]
    assert time["tokens_per_second"] == pytest.approx(tokens / time["seconds"])
    assert time["device_hours"] == pytest.approx(9 * time["seconds"] / 3600)
    assert all(one["step_seconds"] > 0 for one in fit["suggestions"])

    assert ["stages.train.model.config.remat=full"] in [
        one["overrides"] for one in fit["suggestions"]
    ]
    fewer = next(one for one in fit["suggestions"] if "per_device" in one["overrides"][0])
    assert fewer["used_bytes"] <= fit["limit_bytes"]
    # `run` knows it from the plan, and compiles nothing.
    said = command("run", *words[1:], code=3)
    assert all(" ".join(one["overrides"]) in said for one in fit["suggestions"])
    assert not list(command.folder.glob("redco-workspace/runs/*/"))
    command(
        *words[:2], *words[-1:], *(word for one in fit["suggestions"] for word in one["overrides"])
    )
    rows = int(fewer["overrides"][0].partition("=")[2])
    program = [sys.executable, "-c", INDEPENDENT, str(rows)]
    said = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    same = json.loads(said.splitlines()[-1])
    # Alike but for the schedule's few scalars.
    assert fewer["used_bytes"] == pytest.approx(same["used_bytes"], rel=1e-3)
    # Attention's products are in kernels; the head, in chunks, is multiplied by three times, and
    # its gradients are added up within a product.
    assert same["flops"] == 6 * products * tokens
    assert same["adding"] == [True]


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A smaller training whose plan is searched for, the words for it, and the answer."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "small.yaml").write_text(PIPELINE)
    (folder / "texts.jsonl").write_text('{"text": "a text"}\n')
    devices = "devices: {h100: {hbm_gb_s: 3000}}"
    (folder / "one.yaml").write_text(
        f"{{missing_gpus: warn, local: {{gpu_type: h100}}, {devices}}}"
    )
    calibration = {"profile": "one", "device_kind": "NVIDIA H100 80GB HBM3", "num_devices": 1}
    calibration |= {
        "figures": {"bfloat16_tflops": 700.0},
        "measured_at": "2026-01-31T12:00:30+00:00",
    }
    keep_calibration(Workspace.open(folder / "redco-workspace"), calibration)
    command = Command(folder)
    smaller = ("model.config.num_hidden_layers=2", "global_batch_size=1")
    words = ("small.yaml", "-p", "one.yaml", "stages.train.resources.gpus_per_host=1", *smaller)
    words += ("model.config.remat=full",)
    process = command.start("plan", *words, "--fit", "--search", "--json")
    temporary = Path(compiler_of(process).environ()["TMPDIR"])
    # The candidates share kernels, which are compiled once.
    wait_for((temporary / "kernels").exists)
    found = json.loads(process.communicate(timeout=500)[0].splitlines()[-1])
    assert not temporary.exists()
    return command, words, found["fit"]["train"]


@compiles_for_gpus
def test_the_search_compares_what_is_computed_again_and_the_fastest_is_first(searched):
    _, _, fit = searched

    assert fit["recent_runs"] == ""
    assert fit["device_facts"] == {
        "memory_gib": {"value": 79.1, "origin": "data sheet"},
        "hbm_gb_s": {"value": 3000, "origin": "profile"},
        "bfloat16_tflops": {"value": 700.0, "origin": "measured"},
    }
    as_it_is = next(one for one in fit["candidates"] if not one["overrides"])
    assert as_it_is["used_bytes"] == fit["used_bytes"]
    assert as_it_is["step_seconds"] == fit["step_time"]["seconds"]
    by_remat = {one["remat"]: one["used_bytes"] for one in fit["candidates"] if one["fits"]}
    assert by_remat["none"] > by_remat["minimal"]
    best, *others = fit["candidates"]
    assert best["step_seconds"] <= 1.03 * min(one["step_seconds"] for one in others)
    assert [bool(one["reason"]) for one in fit["candidates"]] == [False, *(True for _ in others)]


@compiles_for_gpus
@pytest.mark.usefixtures("kernel_cache")
def test_a_mesh_left_to_the_search_is_decided_once_for_equal_programs(command, monkeypatch):
    monkeypatch.delenv("SLURM_CONF", raising=False)  # of a cluster of other tests
    (command.folder / "two.yaml").write_text("{executor: slurm, slurm: {gpu_type: h100}}")
    words = ("small.yaml", "-p", "two.yaml", "stages.train.resources.gpus_per_host=2")
    planned = command("plan", *words, "stages.train.mesh=auto", "--fit", "--json")

    fit = json.loads(planned.splitlines()[-1])["fit"]["train"]
    best, *others = fit["candidates"]
    meshes = {(one["num_model_shards"], one["fsdp"]) for one in fit["candidates"]}
    assert meshes == {(1, 1), (1, 2), (2, 1)}
    known = [one["step_seconds"] for one in fit["candidates"] if one["step_seconds"]]
    assert best["step_seconds"] <= 1.03 * min(known)
    assert all(one["reason"] for one in others)
    sizes = {name: best[name] for name in ("num_model_shards", "fsdp")}
    assert fit["chosen"] == {"mesh": None, **sizes}
    assert (fit["used_bytes"], fit["fits"]) == (best["used_bytes"], True)
    assert fit["estimated_bytes"] == pytest.approx(fit["used_bytes"], rel=0.1)
    # Neither a seed nor a learning rate changes the program, and the choice has these figures.
    swept = ("--sweep", "stages.train.seed=1,2", "stages.train.learning_rate=0.003")
    points = command.start("run", "-n", *words, "stages.train.mesh=auto", *swept)
    _, notes = points.communicate(timeout=500)
    chosen = " ".join(f"{name}={value}" for name, value in sizes.items())
    assert f"mesh: auto for h100x2: {chosen} (" in notes
    assert "is searched when" not in notes  # of neither point
    # The overrides that were printed are for the same command.
    written = ("stages.train.mesh=auto", *best["overrides"])
    again = json.loads(command("plan", *words, *written, "--fit", "--json").splitlines()[-1])
    assert again["fit"]["train"]["planning_cpu_seconds"] == fit["planning_cpu_seconds"]
    assert "candidates" not in again["fit"]["train"]
    # For other objectives fewer devices are searched, too; what is known is not compiled again.
    cheapest = command("plan", *words, "stages.train.mesh=cheapest", "--fit", "--json")
    found = json.loads(cheapest.splitlines()[-1])["fit"]["train"]
    steps = {one["target"]: one["step_seconds"] for one in found["devices"]}
    costs = {target: int(target[-1]) * seconds for target, seconds in steps.items()}
    assert steps["h100x2"] == best["step_seconds"]
    assert costs[found["target"]] <= 1.03 * min(costs["h100x1"], costs["h100x2"])
    rendered = command("plan", *words, "stages.train.mesh=cheapest", "--render")
    assert f"--gpus-per-node=h100:{found['target'][-1]}" in rendered

    answers = list(Workspace(command.folder / "redco-workspace").cache.glob("fits/*"))
    (path,) = (
        one
        for one in answers
        if "chosen" in (kept := json.loads(one.read_text())["fit"]) and kept["num_devices"] == 2
    )
    written_at = [one.stat().st_mtime_ns for one in answers]
    fit = {**json.loads(path.read_text())["fit"], "fits": False}
    auto = (*words, "stages.train.mesh=auto")
    planned = command.start("plan", *words, "stages.train.mesh=first", "--render")
    _, notes = planned.communicate(timeout=500)
    assert "mesh: first for h100x" in notes
    assert "no expected start (" in notes  # there is no cluster here
    assert [one.stat().st_mtime_ns for one in answers] == written_at
    write_json(path, {"fit": fit, "digest": digest_json(fit)})
    refused = command("run", *auto, *swept, code=3)
    assert refused.count("stage 'train' does not fit 2 x h100") == 1  # of both points
    assert not list(command.folder.glob("redco-workspace/sweeps/*/"))
    write_json(path, {"fits": True, "candidates": []})
    damaged = command.start("plan", *auto)
    assert "mesh: auto is searched when the run starts" in damaged.communicate(timeout=300)[1]


def test_a_mesh_that_cannot_be_left_to_the_search_is_reported_at_its_place(command):
    text = PIPELINE.replace("  train:\n", "  train:\n    mesh: auto\n    fsdp: 1\n")
    (command.folder / "both.yaml").write_text(text)
    (command.folder / "auto.yaml").write_text(text.replace("    fsdp: 1\n", ""))
    (command.folder / "unnamed.yaml").write_text("{executor: slurm}")
    line = text[: text.index("fsdp: 1")].count("\n") + 1

    both = command("plan", "both.yaml", code=2)
    gpus = "stages.train.resources.gpus_per_host=8"
    unnamed = command("run", "auto.yaml", "-p", "unnamed.yaml", gpus, code=2)

    assert f"both.yaml:{line}:" in both
    assert "'stages.train.fsdp': `mesh: auto` chooses it" in both
    scheduled = command(
        *("schedule", "add", "auto.yaml", "-p", "unnamed.yaml", "--every", "1d", gpus), code=2
    )

    assert scheduled == unnamed
    assert f"auto.yaml:{line - 1}:" in unnamed
    assert "gpu_type" in unnamed
    assert "Or set num_model_shards and fsdp in place of 'mesh'." in unnamed
    assert not list(command.folder.glob("redco-workspace/runs/*/"))


def test_a_search_is_for_the_gpus_that_a_stage_gets_and_each_target_has_its_own_error(command):
    hosts = "{{executor: hosts, hosts: {{{}addresses: [{{address: a, gpus: {}}}]}}}}"
    (command.folder / "six.yaml").write_text(hosts.format("gpu_type: v5p, ", 6))
    (command.folder / "none.yaml").write_text(hosts.format("", 0))
    words = ("plan", "small.yaml", "stages.train.mesh=auto", "global_batch_size=12")
    requested = "stages.train.resources.gpus_per_host=3"

    planned = command.start(*words, "-p", "none.yaml")
    said = planned.communicate(timeout=300)[1]
    six = command(*words, "-p", "six.yaml", requested, "--fit", code=2)
    several = command.start(*words, "--fit", "--target", "h1000x2,h2000x4", "--json")
    fits = json.loads(several.communicate(timeout=300)[0])["fit"]

    assert "mesh: auto: the stage requests no GPUs: all devices are data shards" in said
    assert "give the topology of 6 chips" in six
    for target, found in fits.items():
        assert f"the device '{target.partition('x')[0]}' is not known" in found["train"]["error"]
        assert found["train"]["error"].endswith(
            "Or set num_model_shards and fsdp in place of 'mesh'."
        )
    assert several.returncode == 2


@compiles_for_gpus
def test_a_run_records_its_prediction_and_everything_shows_it_next_to_the_measurement(searched):
    command, words, fit = searched
    # The prediction is recorded at the start; the training need not begin, so no stage can.
    command("run", *words, "profile.environment.PYTHONHOME=/nowhere", code=1)
    workspace = Workspace(command.folder / "redco-workspace")
    (run,) = list_runs(workspace)
    seconds, gib = fit["step_time"]["seconds"], fit["used_bytes"] / 2**30
    predicted = f"step time predicted {seconds:.3g} s; memory per device predicted {gib:.3g} GiB"
    shown = command("status", "@last")
    assert f"    {predicted}, on h100x1; the prediction assumed that the vocabulary has" in shown
    assert "predictions" not in command("doctor", "-p", "one.yaml")

    measured = {"step_seconds": 1.25 * seconds, "peak_memory_bytes": round(0.9 * gib * 2**30)}
    progress = {"devices": "NVIDIA H200", **measured, "time": "2026-01-31T12:00:30+00:00"}
    path = run.new_attempt("train").progress_path
    write_json(path, progress)
    others = f"    {predicted}, for h100x1; not compared: it ran on NVIDIA H200"
    assert others in command("status", "@last").splitlines()
    assert "predictions" not in command("doctor", "-p", "one.yaml")

    write_json(path, {**progress, "devices": "NVIDIA H100 80GB HBM3"})
    shown = command.json("status", "@last")["stages"]["train"]["fit"]
    assert shown["assumed"] == fit["notes"]
    assert "predictions" not in command("doctor", "-p", "one.yaml")
    # As if the dataset had been there.
    write_fits(run, {"train": {**read_fits(run)["train"], "assumed": []}})
    assert (shown["time"]["error_percent"], shown["memory"]["error_percent"]) == (25.0, -10.0)
    recent = (
        "a recent run on h100: steps 25 % slower than predicted, 10 % less memory than predicted"
    )
    assert f"ok    predictions: {recent}; {run.id}/train: step time" in command(
        "doctor", "-p", "one.yaml"
    )
    said = command("plan", *words, "--fit", "--search", "--html", "plan.html")
    page = html.unescape((command.folder / "plan.html").read_text())
    same = f"{run.id}/train: step time {1.25 * seconds:.3g} s, predicted {seconds:.3g} s (+25.0 %)"
    for one in (said, page):
        assert f"recent runs{': ' if one is said else '</th><td>'}{recent}" in one
        assert same in one
        assert all(" ".join(candidate["overrides"]) in one for candidate in fit["candidates"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--target", "h1000x8"],
            "stage 'train': the device 'h1000' is not known; known devices: ",
        ),
        (["--target", "v5p:2x2"], "stage 'train': the target 'v5p:2x2': a slice of v5p is AxBxC."),
        ([], "profile 'local' does not say which devices it runs on"),
        (
            ["--target", "h100x8", "num_model_shards=3"],
            "stage 'train': num_model_shards=3 does not divide the 8 devices; allowed: 1, 2, 4, 8.",
        ),
        (
            [
                "--target",
                "h100x8",
                "model.name_or_path=org/absent",
                "~model.config",
                "~data.tokenizer",
            ],
            "org/absent",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(command, words, said):
    heard = command(
        "plan", "small.yaml", "--fit", *words, code=2, environment={"HF_HUB_OFFLINE": "1"}
    )

    assert said in heard
    assert heard.count("\n") == 1


def compiler_of(process):
    """Return the process with the compiler, once it is there."""

    def look():
        children = psutil.Process(process.pid).children()
        return next(
            (one for one in children if "redco_flow.stages.train.fit" in one.cmdline()), None
        )

    return wait_for(look)


def test_an_interruption_and_a_crash_of_the_compiler_end_both_processes(command):
    words = ("plan", "small.yaml", "--fit", "--target", "v5ex8")
    crashed = command.start(*words)
    compilers = [compiler_of(crashed)]
    # At once: once libtpu is loaded, it spends half a minute on naming the functions of a stack.
    compilers[0].send_signal(signal.SIGSEGV)
    _, said = crashed.communicate(timeout=300)
    interrupted = command.start(*words)
    compilers.append(compiler_of(interrupted))
    interrupted.send_signal(signal.SIGINT)
    _, err = interrupted.communicate(timeout=300)

    assert (interrupted.returncode, err) == (130, "")
    assert crashed.returncode == 1
    assert said.startswith("redco-flow: stage 'train': the compiler's process ended by SIGSEGV.")
    assert not any(one.is_running() for one in compilers)

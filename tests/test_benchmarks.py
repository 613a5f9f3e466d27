"""The smallest benchmarks that compile for NVIDIA GPUs that are not there, by the CUDA plugin.

Those that compile for TPUs run beside what they measure: `tests/engine/test_attention_kernels.py`,
`tests/models/test_segments.py`. A process of its own registers the plugin: here JAX is on CPUs.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from redco_flow.engine.step.seldom import SELDOM

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PLUGIN = f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
NEEDED = {"jax_plugins.xla_cuda13": PLUGIN, "nvidia.cu13": "nvidia-cuda-nvcc nvidia-nvvm"}

pytestmark = pytest.mark.slow


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture
def measure():
    """Run a benchmark for A100s; give its last line."""
    missing = [packages for module, packages in NEEDED.items() if not is_installed(module)]
    if missing:
        pytest.skip(f"pip install {' '.join(missing)}")

    def run(script, *arguments):
        command = [sys.executable, BENCHMARKS / script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_a_program_for_gpus_sends_what_the_closed_form_says(measure):
    """Also in loops: of a LLaMA's layers, forward and backward."""
    record = measure("collectives.py", "--target", "gpu", "--num-model-shards", "2")

    assert 0.99 <= record["ratio"] <= 1.05


def test_a_step_for_gpus_takes_its_state_what_it_keeps_and_one_layers_work(measure):
    rows, length, width, layers = 8, 512, 512, 32
    given = ["--model", "tiny", "--mesh", "model 4 x fsdp 2", "--length", str(length)]

    (record,) = measure("step_memory.py", "--target", "a100", *given)["step_memory"]

    layer = 4 * width * width + 3 * width * 1536 + 2 * width
    num_params = layers * layer + 2 * 2048 * width + width
    # Parameters, first and second moments in float32; norms are not split.
    assert record["state_gib"] == pytest.approx(12 * num_params / 8 / 2**30, rel=0.02)
    # Of each layer its input, split over the model's shards, and attention's result likewise.
    kept = layers * rows * length * width * (2 + 2) / 8
    assert record["kept_gib"] == pytest.approx(kept / 2**30, abs=1e-3)
    # One layer's scores, in float32: of four rows one head, forward and backward.
    assert record["layer_gib"] > 2 * 4 * length * length * 4 / 2**30
    assert 0 < record["rest_gib"] < record["peak_gib"] / 2


@pytest.mark.parametrize("rank", [None, 16], ids=["full", "lora"])
def test_a_step_multiplies_by_the_head_once_forward_and_adds_up_within_products(
    measure, tmp_path, rank
):
    """Of 3.9 GiB of logits, in chunks: for a frozen head two products, for another three."""
    rows, length, layers, width, units, vocab_size = 8, 2048, 2, 2048, 8192, 128256
    given = ["--model", "llama-3.2-1b", "--mesh", "one device", "--remat", "none", "--whole"]
    given += ["--layers", str(layers), "--rows", str(rows), "--length", str(length)]
    given += ["--hlo", tmp_path / "hlo", *([] if rank is None else ["--lora", str(rank)])]

    (record,) = measure("step_memory.py", "--target", "h100", *given)["step_memory"]

    heads = 2 * width + 2 * 512  # outputs of queries, keys and values
    kernels = layers * (width * (heads + 3 * units)) + width * vocab_size
    factors = layers * (2 * width + width + 1024 + 2 * width + 2 * width + 3 * units)
    each = 6 * kernels if rank is None else 4 * kernels + 6 * rank * factors
    assert record["product_tflop"] == pytest.approx(each * rows * length / 1e12, rel=0.02)
    added = re.compile(rf"= f32\[(1,1,)?{width},{vocab_size}\]\S* add\(")
    computations = re.split(r"\n}\n", (tmp_path / "hlo").read_text())
    adding = [
        each
        for each in computations
        if any(added.search(line) and SELDOM not in line for line in each.splitlines())
    ]
    assert len(adding) == (rank is None)
    assert all(" dot(" in each for each in adding)


def test_windows_and_soft_caps_of_packed_rows_form_no_scores_on_gpus(measure):
    """Nor are keys and values repeated for their heads, as they are for JAX's own kernel."""
    given = ["--target", "a100", "--lengths", "2048", "--window", "256", "--cap", "50", "--xla"]

    (record,) = measure("attention_cost.py", *given)["attention"]

    assert record["ours"]["score_arrays"] == 0 < record["xla"]["score_arrays"]
    # Forward, and the gradients of queries, and of keys and values.
    assert record["ours"]["kernels"] == 3
    assert record["hbm_bytes_ratio"] < 1
    assert record["temp_bytes_ratio"] < 1

"""The smallest benchmarks that compile for NVIDIA GPUs that are not there, by the CUDA plugin.

Those that compile for TPUs run beside what they measure: `tests/engine/test_attention_kernels.py`,
`tests/models/test_segments.py`. A process of its own registers the plugin: here JAX is on CPUs.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PLUGIN = f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
NEEDED = {"jax_plugins.xla_cuda13": PLUGIN, "nvidia.cu13": "nvidia-cuda-nvcc nvidia-nvvm"}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernel_cache")]


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


def test_a_program_for_gpus_sends_and_keeps_what_the_closed_forms_say(measure):
    """Also in loops: of a LLaMA's layers, forward and backward."""
    rows, length, width, layers, vocab_size = 8, 512, 1024, 4, 32000

    record = measure("collectives.py", "--target", "gpu", "--num-model-shards", "2", "--remat=full")

    assert 0.99 <= record["ratio"] <= 1.05
    num_params = layers * (4 * width**2 + 3 * width * 4096) + 2 * vocab_size * width
    # Parameters, first and second moments in float32; norms are not split.
    assert record["state_bytes"] == pytest.approx(12 * num_params / 2, rel=1e-3)
    # Gradients; the logits and their gradients; each layer's input.
    logits = rows * length * vocab_size
    kept = 4 * num_params / 2 + 2 * 4 * logits / 2 + layers * 4 * rows * length * width
    # Compilers that order the same program otherwise keep as much again for a while.
    assert 0.98 * kept < record["temporary_bytes"] < 1.7 * kept


def test_a_step_multiplies_by_a_frozen_head_twice(measure):
    """Of 3.9 GiB of logits, in chunks; for another head three times: `tests/cli/test_fit.py`."""
    rows, length, layers, width, units, vocab_size, rank = 8, 2048, 2, 2048, 8192, 128256, 16
    given = ["--model", "llama-3.2-1b", "--mesh", "one device", "--remat", "none"]
    given += ["--layers", str(layers), "--rows", str(rows), "--length", str(length)]
    given += ["--lora", str(rank)]

    (record,) = measure("step_memory.py", "--target", "h100", *given)["step_memory"]

    heads = 2 * width + 2 * 512  # outputs of queries, keys and values
    kernels = layers * (width * (heads + 3 * units)) + width * vocab_size
    factors = layers * (2 * width + width + 1024 + 2 * width + 2 * width + 3 * units)
    each = 4 * kernels + 6 * rank * factors
    assert record["product_tflop"] == pytest.approx(each * rows * length / 1e12, rel=0.02)


def test_the_mesh_of_the_search_is_as_fast_as_the_fastest_of_all_that_are_compiled(measure):
    found = measure("mesh_search.py", "llama-2")["mesh_search"]

    assert found["worst_ratio"] <= 1.05
    assert found["compiled"] < found["meshes"] == 3


def test_windows_and_soft_caps_of_packed_rows_form_no_scores_on_gpus(measure):
    """Nor are keys and values repeated for their heads, as they are for JAX's own kernel."""
    given = ["--target", "a100", "--lengths", "2048", "--window", "256", "--cap", "50", "--xla"]

    (record,) = measure("attention_cost.py", *given)["attention"]

    assert record["ours"]["score_arrays"] == 0 < record["xla"]["score_arrays"]
    # Forward, and the gradients of queries, and of keys and values.
    assert record["ours"]["kernels"] == 3
    assert record["hbm_bytes_ratio"] < 1
    assert record["temp_bytes_ratio"] < 1

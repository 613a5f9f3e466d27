"""The script in docs/ that shows the engine on its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_the_template_learns_and_predicts_over_two_model_shards():
    two_devices = re.sub("(device_count)=8", r"\1=2", os.environ["XLA_FLAGS"])
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "XLA_FLAGS": two_devices}

    done = subprocess.run(
        [sys.executable, "docs/template.py", "--num-model-shards", "2", "--num-epochs", "3"],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert done.returncode == 0, done.stderr
    assert "column-parallel over 8 heads" in done.stdout
    # Spelling at random gets none of the 200 words right.
    assert float(re.findall(r"exact match ([\d.]+)", done.stdout)[0]) > 0.9

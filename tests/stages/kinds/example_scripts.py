"""The scripts in examples/: run by hand, imported, and what they made compared."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

PROJECT = Path(__file__).resolve().parents[3]


def run_by_hand(name, folder, *words):
    """Run an example on two CPU devices; return what it printed."""
    folder.mkdir()
    two_devices = re.sub("(device_count)=8", r"\1=2", os.environ["XLA_FLAGS"])
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "XLA_FLAGS": two_devices}
    done = subprocess.run(
        [sys.executable, PROJECT / "examples" / name, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def load_example(name):
    """Import an example's module."""
    spec = importlib.util.spec_from_file_location(name, PROJECT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_close(arrays, others, atol):
    """Compare two mappings of arrays by name."""
    assert arrays.keys() == others.keys()
    for name in arrays:
        np.testing.assert_allclose(arrays[name], others[name], atol=atol)

"""What every test shares: eight CPU devices, no hub, no telemetry. Set before JAX is imported."""

import os
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["DO_NOT_TRACK"] = "1"
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def e2e_data() -> Path:
    """The E2E restaurant data, where the machine has it beside the checkout."""
    folder = PROJECT.parent / "shared" / "data" / "e2e"
    if not (folder / "test.csv").is_file():
        pytest.skip(f"the E2E data is not at {folder}")
    return folder

"""What the tests on a real GPU share: `make test-gpu` runs them, and nothing else does."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """The first NVIDIA GPU."""
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        pytest.skip(f"these tests need an NVIDIA GPU: {error}")
    if not device.device_kind.startswith("NVIDIA"):
        pytest.skip(f"these tests need an NVIDIA GPU, and JAX computes on {device.device_kind}")
    return device


@pytest.fixture(scope="session")
def cpu():
    """The processor that results of the GPU are compared with."""
    return jax.devices("cpu")[0]

"""redco-flow: launch, shard, track and chain JAX finetuning jobs.

The engine stands on its own: `from redco_flow import Deployer, Trainer, Predictor`. The names
are imported on first use, so that the command line never pays for JAX.
"""

from __future__ import annotations

from redco_flow import search_path

search_path.arrange()  # first of all: what is imported below must be what is installed

from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from redco_flow.engine.deployer import Deployer
    from redco_flow.engine.predictor import Predictor
    from redco_flow.engine.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Deployer", "Predictor", "Trainer", "__version__"]

_ENGINE_MODULES = {
    "Deployer": "redco_flow.engine.deployer",
    "Predictor": "redco_flow.engine.predictor",
    "Trainer": "redco_flow.engine.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _ENGINE_MODULES:
        raise AttributeError(f"module 'redco_flow' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_ENGINE_MODULES[name]), name)

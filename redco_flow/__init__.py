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
    from redco_flow.engine.rounds import Rounds
    from redco_flow.engine.trainer import Trainer
    from redco_flow.engine.training_plan import TrainingPlan
    from redco_flow.stages.script.context import script_context

__version__ = "0.2.0"
__all__ = [
    "Deployer",
    "Predictor",
    "Rounds",
    "Trainer",
    "TrainingPlan",
    "__version__",
    "script_context",
]

_MODULES = {
    "Deployer": "redco_flow.engine.deployer",
    "Predictor": "redco_flow.engine.predictor",
    "Rounds": "redco_flow.engine.rounds",
    "Trainer": "redco_flow.engine.trainer",
    "TrainingPlan": "redco_flow.engine.training_plan",
    "script_context": "redco_flow.stages.script.context",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'redco_flow' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)

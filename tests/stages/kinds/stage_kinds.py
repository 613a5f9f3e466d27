"""The two modules of each stage kind as one object: `Config` and the like, and `run`."""

from importlib import import_module


class Kind:
    def __init__(self, name):
        self._modules = [f"redco_flow.stages.{name}.{part}" for part in ("config", "run")]

    def __getattr__(self, name):
        config, run = self._modules
        found = getattr(import_module(config), name, None)
        return getattr(import_module(run), name) if found is None else found


preprocess, train, predict, evaluate, compare, script, harness = map(
    Kind, ("preprocess", "train", "predict", "evaluate", "compare", "script", "harness")
)
reference_scores, curate = map(Kind, ("reference_scores", "curate"))

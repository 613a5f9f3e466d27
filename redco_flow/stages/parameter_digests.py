"""parameter_digests: a checkpoint in, the digest of each parameter's bytes out.

Two checkpoints whose parameters are bitwise equal give one artifact, whatever their files hold.
Light at the top, for plans read its Config.
"""

from __future__ import annotations

import hashlib

from redco_flow.models.find import FAMILIES, find_module_name
from redco_flow.recipes.recipe import recipe_module
from redco_flow.records import write_json
from redco_flow.spec.model import Text
from redco_flow.spec.stage_kind import InputSlot, StageConfig
from redco_flow.stages.context import Output, StageContext, StageOutputs

SECTIONS = ("recipe",)
INPUTS = {"checkpoint": InputSlot(kind="checkpoint", default_selector="last")}
OUTPUTS = {"metrics": "metrics"}
DIGESTS_FILE = "parameters.json"


class Config(StageConfig):
    """Nothing to be set but which checkpoint, and the recipe that made it.

    Args:
        recipe: the checkpoint's; the pipeline's own where the stage does not say it.
    """

    recipe: Text = "text_to_text"


def code_modules(config: Config) -> list[str]:
    """The recipe, and every family: which one the checkpoint is of, no plan can know."""
    return [recipe_module(config.recipe), *map(find_module_name, FAMILIES)]


def run(context: StageContext, config: Config) -> StageOutputs:
    """Read all parameters onto one device and digest them.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    del config  # it says what the result depends on
    import jax
    import numpy as np

    from redco_flow.engine.deployer import Deployer
    from redco_flow.engine.parameter_paths import join, named_leaves
    from redco_flow.stages.checkpoint_artifact import CheckpointArtifact

    context.report(phase="digesting")
    checkpoint = CheckpointArtifact(context.input("checkpoint").path)
    params = checkpoint.load_params(checkpoint.build_recipe(), Deployer(devices=jax.devices()[:1]))
    digests = {
        join(path): hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
        for path, leaf in named_leaves(params)
    }
    folder = context.work_dir / "digests"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DIGESTS_FILE, digests)
    return StageOutputs({"metrics": Output("metrics", folder)}, {"parameters": len(digests)})

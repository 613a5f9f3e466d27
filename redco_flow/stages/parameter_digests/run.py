"""parameter_digests: a checkpoint in, the digest of each parameter's bytes out.

Two checkpoints whose parameters are bitwise equal give one artifact, whatever their files hold.
"""

from __future__ import annotations

import hashlib

import jax
import numpy as np

from redco_flow.engine.deployer import Deployer
from redco_flow.engine.sharding.rules import join, named_leaves
from redco_flow.records import write_json
from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.parameter_digests.config import Config

DIGESTS_FILE = "parameters.json"


def run(context: StageContext, config: Config) -> StageOutputs:
    """Read all parameters onto one device and digest them.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    del config  # it says what the result depends on
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

"""A tiny training pipeline, run by a thread of the test itself: no Prefect, any executor."""

import json
import threading

from redco_flow.orchestrate.run.cancel import StopRequest
from redco_flow.orchestrate.run.driver import open_session
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.orchestrate.run.start import write_run
from redco_flow.orchestrate.run.state import StateStore
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.profile import profile_model
from redco_flow.tracking.workspace import Workspace

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
ROWS = [(f"{a} {b}", f"{b} {a}") for a in WORDS for b in WORDS]
PIPELINE = """
name: tiny
model:
  family: t5
  config: {{d_model: 16, d_kv: 4, d_ff: 16, num_layers: 1, num_heads: 2, dropout_rate: 0.1}}
data:
  train: {rows}
  validation_fraction: 0.2
  tokenizer: {{train: {{vocab_size: 290, type: bpe}}}}
stages:
  preprocess: {{max_source_length: 8, max_target_length: 8}}
  train:
    num_epochs: {num_epochs}
    global_batch_size: 16
    learning_rate: 0.01
    keep: {{last: 1, best: [eval_loss]}}
    eval: {{num_examples: 8}}
    log_every_steps: 1
    resources: {{num_hosts: {num_hosts}}}
"""
PREDICT = """\
  predict: {{batch_size: 4, resources: {{num_hosts: {num_hosts}}}}}
"""


def make_run(
    folder,
    *,
    num_hosts=1,
    num_epochs=2,
    overrides=(),
    workspace="workspace",
    until=None,
    predict=False,
    force=(),
    ahead=False,
    **profile,
):
    """Write a run of the tiny pipeline; nothing is started."""
    rows = folder / "rows.jsonl"
    lines = (json.dumps({"source": source, "target": target}) for source, target in ROWS)
    rows.write_text("".join(f"{line}\n" for line in lines))
    path = folder / "tiny.yaml"
    text = PIPELINE + (PREDICT if predict else "")
    path.write_text(text.format(rows=rows, num_hosts=num_hosts, num_epochs=num_epochs))
    settings = profile_model()(workspace=str(folder / workspace), **profile)
    resolved = load_pipeline(path, overrides, settings)
    workspace = Workspace.open(settings.workspace)
    plan = make_plan(resolved, workspace, until_stage=until, force=force)
    given = {"overrides": overrides, "argv": ["redco-flow"], "ahead": ahead}
    return write_run(resolved, settings, workspace, plan, **given)


class Driven:
    """A run driven by a thread; `end` waits for it."""

    def __init__(self, run):
        self.run = run
        self.stop = StopRequest()
        self.said = []
        self.session = open_session(run, StateStore(run), self.stop, leave_cancelled=False)
        self._thread = threading.Thread(target=self._drive)
        self._thread.start()

    def _drive(self):
        self.session.submit_ahead(self.said.append)
        self.session.run_stages(self.said.append, with_job_lines=True)

    def end(self, seconds=400):
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "\n".join(self.said)
        outcome = self.session.conclude()
        if outcome.state != "detached":
            state_store = self.session.context.state_store
            state_store.close_run(outcome.state, outcome.exit_code, outcome.message)
        return outcome

    def stage(self, name):
        return self.run.read_state()["stages"][name]


def losses(run, stage="train"):
    """Loss by step over all attempts, the last record of a step only."""
    records = [record for attempt in run.attempts(stage) for record in attempt.read_metrics()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "training"}


def same_parameters(one, other):
    """Whether two runs' last checkpoints are bitwise equal."""
    first, second = parameters_of(one), parameters_of(other)
    assert first.keys() == second.keys()
    return all(first[name].tobytes() == second[name].tobytes() for name in first)


def parameters_of(driven):
    """The last checkpoint's arrays by path, read from the artifact alone."""
    import jax
    import numpy as np

    from redco_flow.engine.deployer import Deployer
    from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
    from redco_flow.tracking.artifacts import ArtifactStore

    artifact = ArtifactStore(driven.session.context.workspace).get(
        driven.stage("train")["artifacts"]["checkpoint/last"]
    )
    checkpoint = CheckpointArtifact(artifact.path)
    params = checkpoint.load_params(checkpoint.build_recipe(), Deployer())
    return {
        jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)
    }

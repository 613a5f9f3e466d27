"""A training whose number of devices is chosen; its step times are a formula, no compiler runs."""

from dataclasses import dataclass

from redco_flow.orchestrate.run.fit import Planned
from redco_flow.orchestrate.run.ingredients import Sources
from redco_flow.orchestrate.run.objectives import ExpectedStarts, choose_devices
from redco_flow.orchestrate.run.plan import make_plan
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.profile import profile_model
from redco_flow.tracking.workspace import Workspace

PIPELINE = """
name: tiny
model: {family: t5}
data: {train: rows.jsonl, tokenizer: {train: {vocab_size: 290}}}
stages:
  preprocess: {max_source_length: 8, max_target_length: 8}
  train: {max_steps: 1000, global_batch_size: 16}
"""
NUM_STEPS = 1000


@dataclass(frozen=True)
class Training:
    """What `choose_devices` chooses for; a step takes `serial + parallel / devices` seconds."""

    planned: Planned
    serial: float
    parallel: float

    @property
    def stage(self):
        return self.planned.pipeline.stages["train"]

    def seconds(self, num_devices):
        return NUM_STEPS * (self.serial + self.parallel / num_devices)

    def find(self, stage):
        resources = stage.resources
        num_devices = resources.num_hosts * resources.gpus_per_host
        seconds = self.seconds(num_devices) / NUM_STEPS
        mesh = {"num_model_shards": 1, "fsdp": num_devices}
        candidate = {"overrides": ["stages.train.mesh=null"], "fits": True, "step_seconds": seconds}
        return {
            "target": f"h100x{num_devices}",
            "device": "h100",
            "reported": "NVIDIA H100.*",
            "num_devices": num_devices,
            "mesh": {"fsdp": num_devices},
            "fits": True,
            "used_bytes": 2**30,
            "parts_bytes": {},
            "step_time": {"seconds": seconds, "parts_seconds": {}},
            "device_facts": {},
            "assumed": [],
            "num_steps": NUM_STEPS,
            "chosen": {"mesh": None, **mesh},
            "candidates": [candidate],
            "suggestions": [],
            "search_notes": [],
        }

    def choose(self):
        return choose_devices(self.stage, self.planned, self.find, ExpectedStarts())


def training(folder, *overrides, serial, parallel, **profile):
    """Load the pipeline in `folder`, with overrides of its stage `train`."""
    (folder / "rows.jsonl").write_text('{"source": "a", "target": "b"}\n')
    path = folder / "tiny.yaml"
    path.write_text(PIPELINE.replace("rows.jsonl", str(folder / "rows.jsonl")))
    settings = profile_model()(workspace=str(folder / "workspace"), **profile)
    pipeline = load_pipeline(path, [f"stages.train.{one}" for one in overrides], settings)
    workspace, sources = Workspace.open(settings.workspace), Sources()
    plan = make_plan(pipeline, workspace, sources=sources)
    planned = Planned(pipeline, settings, workspace, plan, sources, None)
    return Training(planned, serial, parallel)

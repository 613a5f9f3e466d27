"""A stage kind: how long the generated texts are."""

import json

from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.spec.model import NonNegativeInt
from redco_flow.spec.stage_kind import InputSlot, StageConfig

INPUTS = {"predictions": InputSlot(kind="predictions")}  # becomes the key `predictions:` in YAML
OUTPUTS = {"metrics": "metrics"}


class Config(StageConfig):
    """The stage's keys in YAML.

    Args:
        longer_than: count the texts that have more characters.
    """

    longer_than: NonNegativeInt = 2


def run(context: StageContext, config: Config) -> StageOutputs:
    """Read the inputs, write files below `work_dir`, name what is to be kept."""
    (predictions,) = context.inputs["predictions"]
    lines = (predictions.path / "predictions.jsonl").read_text().splitlines()
    texts = [json.loads(line)["prediction"] for line in lines]
    share = sum(len(text) > config.longer_than for text in texts) / len(texts)
    path = context.work_dir / "lengths.json"
    path.write_text(json.dumps({"share_longer": share}))
    return StageOutputs({"metrics": Output("metrics", path)}, {"share_longer": share})

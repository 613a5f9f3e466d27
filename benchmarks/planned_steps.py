"""Train steps as pipelines describe them, planned for devices that need not be there."""

import tempfile
from pathlib import Path
from typing import Any

import yaml

from redco_flow.engine.targets import read_target
from redco_flow.spec.load import load_pipeline

_ENCODER_DECODERS = ("t5", "bart")
_SHARE_OF_GPU = 0.92


def plan_steps(
    target_name: str,
    family: str,
    config: dict[str, Any],
    *,
    vocabulary: int,
    length: int,
    rows: int,
    dtype: str = "bfloat16",
    **settings: Any,
) -> Any:
    """Return what plans and compiles variants of a step of AdamW.

    Args:
        rows: of a step, `length` tokens each.
        settings: of the train stage.
    """
    target = read_target(target_name)
    target.set_environment()
    # JAX reads its platform when it is imported.
    from redco_flow.stages.train import planned_data
    from redco_flow.stages.train.compiled_steps import StepCompiler

    is_decoder = family not in _ENCODER_DECODERS
    keys = {"text_key": "text"} if is_decoder else {"source_key": "text", "target_key": "text"}
    lengths = {"max_target_length": length} | ({} if is_decoder else {"max_source_length": length})
    windows = {"batching": {"type": "windows", "window_length": length}} if is_decoder else {}
    train = {"max_steps": 10, "global_batch_size": rows, "optimizer": "adamw", "keep": {"last": 1}}
    with tempfile.TemporaryDirectory() as folder:
        path, texts = Path(folder) / "step.yaml", Path(folder) / "texts.jsonl"
        texts.write_text('{"text": "a text"}\n')
        tokenizer = {"train": {"vocab_size": vocabulary}}
        pipeline = {
            "name": "step",
            "recipe": "language_modeling" if is_decoder else "text_to_text",
            "model": {"family": family, "dtype": dtype, "config": config},
            "data": {"train": str(texts), **keys, "tokenizer": tokenizer},
            "stages": {"preprocess": lengths, "train": {**train, **windows, **settings}},
        }
        path.write_text(yaml.safe_dump(pipeline))
        stages = load_pipeline(path).stages
    config_of_train, preprocess = (stages[stage].config for stage in ("train", "preprocess"))
    data = planned_data.of_settings(config_of_train, preprocess, ["dataset"])
    limit = target.device.limit_bytes(_SHARE_OF_GPU)
    return StepCompiler(config_of_train, data, target, target.find_devices(), limit)

"""Keys and values of other tools: the error gives the name here, whatever is nearest by letters."""

from __future__ import annotations

import pytest

from redco_flow.errors import ConfigError
from redco_flow.spec.document import Origin, written_at
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.model import field_paths
from redco_flow.spec.other_names import OTHER_NAMES
from redco_flow.spec.profile import Profile
from redco_flow.spec.stages import key_space

STAGES = ("preprocess", "train", "predict", "evaluate", "harness")
PIPELINE = """\
name: a
recipe: text_to_text
model: {{family: t5{model}}}
data: {{dataset: python:redco_flow.corpora.decompilation, tokenizer: {{train: {{}}}}{data}}}
stages:
  preprocess: {{{preprocess}}}
  train: {{{train}}}
  predict: {{{predict}}}
  evaluate: {{metrics: [bleu]}}
"""
PLACES = ("model", "data", "preprocess", "train", "predict")


def mistakes(tmp_path, place, written, *overrides):
    texts = dict.fromkeys(PLACES, "") | {place: written}
    file = tmp_path / "pipeline.yaml"
    file.write_text(PIPELINE.format(**texts))
    with pytest.raises(ConfigError) as raised:
        load_pipeline(file, overrides)
    return [problem.message for problem in raised.value.problems]


@pytest.mark.parametrize("key", OTHER_NAMES)
def test_every_name_that_is_given_instead_is_a_setting(key):
    document = written_at({"stages": {name: {} for name in STAGES}}, Origin("test"))
    space = key_space(document)
    known = space.settings | space.hidden
    known |= {("profile", *path) for path, _ in field_paths(Profile)}

    for setting in OTHER_NAMES[key][1]:
        path = tuple(setting.partition(":")[0].partition(" ")[0].split("."))
        assert path in known or path[:2] == ("model", "config"), setting


@pytest.mark.parametrize(
    ("place", "written", "own"),
    [
        ("predict", "max_new_tokens: 32", "it is transformers' name; here it is "
         "`max_target_length`."),
        ("train", "lr: 1e-3", "here it is `learning_rate`."),
        ("train", "epochs: 3", "here it is `num_epochs`."),
        ("train", "num_train_epochs: 3", "here it is `num_epochs`."),
        ("train", "batch_size: 8", "here it is `global_batch_size`."),
        ("train", "per_device_train_batch_size: 8", "here it is `per_device_batch_size`."),
        ("train", "gradient_accumulation_steps: 4", "here it is `global_batch_size / "
         "(per_device_batch_size x devices)`."),
        ("train", "warmup: 0.1", "here it is `schedule.warmup_ratio`."),
        ("train", "schedule: {warmup: 0.1}", "here it is `warmup_ratio`."),
        ("train", "model_name_or_path: a/b", "here it is `model.name_or_path`."),
        ("model", ", model_name_or_path: a/b", "here it is `name_or_path`."),
        ("train", "lora: {targets: x, target_modules: [q_proj]}", "here it is `targets`."),
        ("train", "lora: {targets: x, r: 8}", "it is PEFT's name; here it is `rank`."),
        ("train", "output_dir: out", "here it is `profile.workspace`."),
        ("train", "bf16: true", "here it is `model.dtype: bfloat16`."),
        ("train", "bf16: false", "here it is `model.dtype: float32`."),
        ("model", ", torch_dtype: bfloat16", "here it is `dtype`."),
        ("preprocess", "max_seq_length: 512", "it is TRL's name; here it is `max_length` or "
         "`max_source_length`."),
        ("preprocess", "train_on_inputs: false", "here it is `train_on: assistant`."),
        ("train", "max_seq_length: 512", "here it is `stages.preprocess.max_length`."),
        ("data", ", dataset_text_field: text", "here it is `text_key`."),
        ("train", "resources: {time: 60}", "it is Slurm's name; here it is `walltime_minutes`."),
    ],
)  # fmt: skip
def test_a_key_of_another_tool_is_answered_with_its_name_here(tmp_path, place, written, own):
    (message,) = mistakes(tmp_path, place, written)

    assert message.endswith(own)


def test_a_key_of_another_tool_on_the_command_line_is_answered_likewise(tmp_path):
    (message,) = mistakes(tmp_path, "train", "", "lr=1e-3")

    assert message == "there is no setting 'lr': here it is `stages.train.learning_rate`."


@pytest.mark.parametrize(
    ("place", "written", "message"),
    [
        ("model", ", dtype: bf16", "'model.dtype' must be one of 'float32' or 'bfloat16', not "
         "'bf16'; here it is 'bfloat16'"),
        ("train", "optimizer: adamw_torch", "'stages.train.optimizer' must be one of 'adamw', "
         "'adafactor', 'lion' or 'sgd', not 'adamw_torch'; here it is 'adamw'"),
        ("train", "schedule: {type: constant_with_warmup}", "'stages.train.schedule.type' must be "
         "one of 'linear', 'cosine', 'constant', 'inverse_sqrt' or 'wsd', not "
         "'constant_with_warmup'; here it is 'constant'"),
        ("train", "learning_rate: [1e-3, 3e-3]", "'stages.train.learning_rate' must be a number, "
         "not [0.001, 0.003]; a run with each of them: --sweep "
         "stages.train.learning_rate=0.001,0.003"),
    ],
)  # fmt: skip
def test_a_value_of_another_tool_is_answered_with_the_value_here(tmp_path, place, written, message):
    assert mistakes(tmp_path, place, written) == [message]


def test_of_many_known_keys_only_similar_ones_are_listed(tmp_path):
    (message,) = mistakes(tmp_path, "train", "lerning_rate: 1e-3")

    assert message.startswith("stage 'train' has no key 'lerning_rate'; did you mean "
                              "'learning_rate'? Similar keys: learning_rate, ")  # fmt: skip
    assert message.endswith(
        "are in the reference and `redco-flow schema` (for a profile, `redco-flow profile`)."
    )
    assert len(message) < 300

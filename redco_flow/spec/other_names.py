"""Keys and values as other tools name them, and what they are called in a pipeline here.

An unknown key that is in this table gets its name here, whatever known key is nearest by spelling.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from redco_flow.spec.document import KeyPath

_TRL, _AXOLOTL, _FACTORY = "TRL", "Axolotl", "LLaMA-Factory"
_HF, _PEFT, _SLURM, _LM_EVAL = "transformers", "PEFT", "Slurm", "lm-eval"
_NEMO = "NeMo"
_ANY = ""

_MAX_LENGTH = (
    "stages.preprocess.max_length",
    "stages.preprocess.max_source_length",
)
_NEW_TOKENS = ("stages.predict.max_target_length", "stages.harness.max_gen_toks")
_PER_DEVICE = "stages.train.per_device_batch_size"
_TRAIN_ON = "stages.preprocess.train_on"

OTHER_NAMES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    # model
    "model_name_or_path": (_TRL, ("model.name_or_path",)),
    "model_name": (_ANY, ("model.name_or_path",)),
    "pretrained_model_name_or_path": (_HF, ("model.name_or_path",)),
    "base_model": (_AXOLOTL, ("model.name_or_path",)),
    "model_revision": (_TRL, ("model.revision",)),
    "model_type": (_HF, ("model.family",)),
    "torch_dtype": (_HF, ("model.dtype",)),
    "bf16": (_HF, ("model.dtype: bfloat16",)),
    "fp16": (_HF, ("model.dtype: bfloat16",)),
    "precision": (_ANY, ("model.dtype",)),
    "mixed_precision": (_ANY, ("model.dtype",)),
    "attn_implementation": (_HF, ("model.config.attention",)),
    "flash_attention": (_AXOLOTL, ("model.config.attention",)),
    "flash_attn": (_FACTORY, ("model.config.attention",)),
    "gradient_checkpointing": (_HF, ("model.config.remat: full",)),
    # data
    "data_files": (_HF, ("data.train",)),
    "datasets": (_AXOLOTL, ("data.dataset",)),
    "dataset_name": (_TRL, ("data.dataset",)),
    "dataset_config_name": (_HF, ("data.subset",)),
    "train_file": (_HF, ("data.train",)),
    "validation_file": (_HF, ("data.validation",)),
    "test_file": (_HF, ("data.test",)),
    "val_set_size": (_AXOLOTL, ("data.validation_fraction",)),
    "val_size": (_FACTORY, ("data.validation_fraction",)),
    "max_train_samples": (_HF, ("data.max_examples",)),
    "max_samples": (_FACTORY, ("data.max_examples",)),
    "text_column": (_HF, ("data.source_key",)),
    "summary_column": (_HF, ("data.target_key",)),
    "dataset_text_field": (_TRL, ("data.text_key",)),
    "field_messages": (_AXOLOTL, ("data.messages_key",)),
    "chat_template_path": (_TRL, ("data.chat_template",)),
    "chat_template_jinja": (_AXOLOTL, ("data.chat_template",)),
    "default_system": (_FACTORY, ("data.default_system_message",)),
    "tokenizer_name": (_HF, ("data.tokenizer.name_or_path",)),
    "tokenizer_name_or_path": (_ANY, ("data.tokenizer.name_or_path",)),
    # preprocess
    "assistant_only_loss": (_TRL, (f"{_TRAIN_ON}: assistant",)),
    "completion_only_loss": (_TRL, (f"{_TRAIN_ON}: assistant",)),
    "roles_to_train": (_AXOLOTL, (_TRAIN_ON,)),
    "train_on_inputs": (_AXOLOTL, (f"{_TRAIN_ON}: all",)),
    "train_on_prompt": (_FACTORY, (f"{_TRAIN_ON}: all",)),
    "mask_history": (_FACTORY, (f"{_TRAIN_ON}: last",)),
    "sequence_len": (_AXOLOTL, _MAX_LENGTH),
    "max_seq_length": (_TRL, _MAX_LENGTH),
    "max_seq_len": (_ANY, _MAX_LENGTH),
    "seq_length": (_NEMO, _MAX_LENGTH),
    "cutoff_len": (_FACTORY, _MAX_LENGTH),
    "model_max_length": (_HF, _MAX_LENGTH),
    "max_prompt_length": (_TRL, ("stages.preprocess.max_source_length",)),
    "max_completion_length": (_TRL, ("stages.preprocess.max_target_length",)),
    "excess_length_strategy": (_AXOLOTL, ("stages.preprocess.on_too_long",)),
    "preprocessing_num_workers": (_HF, ("stages.preprocess.num_workers",)),
    "dataset_num_proc": (_TRL, ("stages.preprocess.num_workers",)),
    # train
    "lr": (_ANY, ("stages.train.learning_rate",)),
    "epochs": (_ANY, ("stages.train.num_epochs",)),
    "num_train_epochs": (_HF, ("stages.train.num_epochs",)),
    "steps": (_ANY, ("stages.train.max_steps",)),
    "max_train_steps": (_ANY, ("stages.train.max_steps",)),
    "batch_size": (_ANY, ("stages.train.global_batch_size",)),
    "train_batch_size": (_ANY, ("stages.train.global_batch_size",)),
    "per_device_train_batch_size": (_HF, (_PER_DEVICE,)),
    "micro_batch_size": (_AXOLOTL, (_PER_DEVICE,)),
    "gradient_accumulation_steps": (
        _HF,
        ("stages.train.global_batch_size / (per_device_batch_size x devices)",),
    ),
    "optim": (_HF, ("stages.train.optimizer",)),
    "adam_beta1": (_HF, ("stages.train.betas: [BETA1, BETA2]",)),
    "adam_beta2": (_HF, ("stages.train.betas: [BETA1, BETA2]",)),
    "adam_epsilon": (_HF, ("stages.train.epsilon",)),
    "wd": (_ANY, ("stages.train.weight_decay",)),
    "gradient_clipping": (_ANY, ("stages.train.max_grad_norm",)),
    "label_smoothing_factor": (_HF, ("stages.train.label_smoothing",)),
    "lr_scheduler": (_AXOLOTL, ("stages.train.schedule.type",)),
    "lr_scheduler_type": (_HF, ("stages.train.schedule.type",)),
    "warmup": (_ANY, ("stages.train.schedule.warmup_ratio",)),
    "warmup_ratio": (_HF, ("stages.train.schedule.warmup_ratio",)),
    "warmup_steps": (_HF, ("stages.train.schedule.warmup_steps",)),
    "packing": (_TRL, ("stages.train.batching: {type: packed}",)),
    "sample_packing": (_AXOLOTL, ("stages.train.batching: {type: packed}",)),
    "group_by_length": (_HF, ("stages.train.batching: {type: bucketed}",)),
    "eval_steps": (_HF, ("stages.train.eval.every_steps",)),
    "eval_strategy": (_HF, ("stages.train.eval",)),
    "evaluation_strategy": (_HF, ("stages.train.eval",)),
    "logging_steps": (_HF, ("stages.train.log_every_steps",)),
    "save_steps": (_HF, ("stages.train.save_every_steps",)),
    "save_top_k": (_NEMO, ("stages.train.keep.best",)),
    "save_total_limit": (_HF, ("stages.train.keep.last",)),
    "metric_for_best_model": (_HF, ("stages.train.keep.best",)),
    "load_best_model_at_end": (_HF, ("stages.train.keep.best",)),
    "early_stopping_patience": (_HF, ("stages.train.early_stopping.patience",)),
    "report_to": (_HF, ("stages.train.log_to",)),
    "tensor_model_parallel_size": (_NEMO, ("stages.train.num_model_shards",)),
    "tensor_parallel_size": (_ANY, ("stages.train.num_model_shards",)),
    "context_parallel_size": (_ANY, ("stages.train.num_context_shards",)),
    "sequence_parallel_degree": (_AXOLOTL, ("stages.train.num_context_shards",)),
    "random_seed": (_ANY, ("stages.train.seed", "stages.predict.seed")),
    # LoRA
    "r": (_PEFT, ("stages.train.lora.rank",)),
    "lora_r": (_AXOLOTL, ("stages.train.lora.rank",)),
    "lora_rank": (_FACTORY, ("stages.train.lora.rank",)),
    "dim": (_NEMO, ("stages.train.lora.rank",)),
    "lora_alpha": (_PEFT, ("stages.train.lora.alpha",)),
    "lora_dropout": (_PEFT, ("stages.train.lora.dropout",)),
    "target_modules": (_PEFT, ("stages.train.lora.targets",)),
    "lora_target_modules": (_AXOLOTL, ("stages.train.lora.targets",)),
    "lora_target": (_FACTORY, ("stages.train.lora.targets",)),
    "peft_use_rslora": (_AXOLOTL, ("stages.train.lora.rank_stabilized",)),
    "peft_use_dora": (_AXOLOTL, ("stages.train.lora.dora",)),
    "use_rslora": (_PEFT, ("stages.train.lora.rank_stabilized",)),
    "use_dora": (_PEFT, ("stages.train.lora.dora",)),
    "load_in_8bit": (_HF, ("stages.train.lora.base_dtype: int8",)),
    "load_in_4bit": (_HF, ("stages.train.lora.base_dtype: nf4",)),
    # predict, evaluate, harness
    "max_new_tokens": (_HF, _NEW_TOKENS),
    "max_tokens": (_ANY, _NEW_TOKENS),
    "max_length": (_HF, ("stages.predict.max_target_length", "stages.preprocess.max_length")),
    "min_length": (_HF, ("stages.predict.min_new_tokens",)),
    "beam_size": (_ANY, ("stages.predict.num_beams",)),
    "num_generations": (_TRL, ("stages.predict.num_return_sequences",)),
    "stop_strings": (_HF, ("stages.predict.stop",)),
    "stop_sequences": (_ANY, ("stages.predict.stop",)),
    "per_device_eval_batch_size": (_HF, ("stages.predict.batch_size",)),
    "limit": (_LM_EVAL, ("stages.harness.num_examples",)),
    # machines
    "output_dir": (_HF, ("profile.workspace",)),
    "nodes": (_SLURM, ("stages.train.resources.num_hosts",)),
    "num_nodes": (_ANY, ("stages.train.resources.num_hosts",)),
    "gpus_per_node": (_SLURM, ("stages.train.resources.gpus_per_host",)),
    "cpus_per_task": (_SLURM, ("stages.train.resources.cpus_per_host",)),
    "mem": (_SLURM, ("stages.train.resources.memory_gib",)),
    "time": (_SLURM, ("stages.train.resources.walltime_minutes",)),
}
"""Key -> whose name it is, where it is one tool's, and the settings that it can be here.

`KEY: VALUE` is what the other tool's `true` becomes.
"""

_FALSE = {
    "bf16": "model.dtype: float32",
    "fp16": "model.dtype: float32",
    "train_on_inputs": f"{_TRAIN_ON}: assistant",
    "train_on_prompt": f"{_TRAIN_ON}: assistant",
    "assistant_only_loss": f"{_TRAIN_ON}: all",
    "completion_only_loss": f"{_TRAIN_ON}: all",
    "mask_history": f"{_TRAIN_ON}: assistant",
    "gradient_checkpointing": "model.config.remat: none",
}
"""What the other tool's `false` becomes."""

_OTHER_VALUES = {
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "bf16-mixed": "bfloat16",
    "fp16": "bfloat16",
    "float16": "bfloat16",
    "fp32": "float32",
    "torch.float32": "float32",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adam": "adamw",
    "lion_8bit": "lion",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}


def own_name(key: str, owner: KeyPath, known: Collection[str], value: Any = None) -> str | None:
    """Return what a key of another tool is here: "it is TRL's name; here it is `lora.rank`".

    Args:
        key: that its section does not have.
        owner: the section's path in the pipeline.
        known: the section's keys, which tell of a stage what kind it can be.
        value: what was given; false may be another value here.

    Returns:
        None where it is not known as a key of another tool.
    """
    if key not in OTHER_NAMES:
        return None
    tool, settings = OTHER_NAMES[key]
    if value is False and key in _FALSE:
        settings = (_FALSE[key],)
    inside = [_inside(setting, owner, known) for setting in settings]
    own = " or ".join(f"`{one}`" for one in inside if one) or f"`{settings[0]}`"
    whose = f"it is {tool}'{'s' * (not tool.endswith('s'))} name; " if tool else ""
    return f"{whose}here it is {own}"


def _inside(setting: str, owner: KeyPath, known: Collection[str]) -> str:
    """Return a setting as its section writes it; empty where it belongs to another section."""
    name, colon, value = setting.partition(":")
    path = tuple(name.split("."))
    if "resources" in path and path[-1] in known:  # an executor's section has some of them, too
        return path[-1]
    is_of_stage = len(owner) >= 2 and owner[0] == path[0] == "stages"
    is_of_kind = is_of_stage and (owner[1] == path[1] or path[len(owner)] in known)
    if is_of_kind and path[2 : len(owner)] == owner[2:]:
        return ".".join(path[len(owner) :]) + colon + value
    if not is_of_stage and owner and path[: len(owner)] == owner:
        return ".".join(path[len(owner) :]) + colon + value
    return ""


def own_value(value: object, allowed: str) -> str | None:
    """Return which of the allowed values another tool's value is; None where it is not one.

    Args:
        allowed: as Pydantic lists them: "'float32' or 'bfloat16'".
    """
    own = _OTHER_VALUES.get(value) if isinstance(value, str) else None
    return own if own is not None and f"'{own}'" in allowed else None

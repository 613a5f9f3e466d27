"""Make the first pipeline for a data file: its recipe, model, lengths, batches and splits.

`redco-flow init --data` loads this module by name on a login node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.hub import is_hub_name
from redco_flow.local_paths import expanded, is_folder
from redco_flow.recipes.find import find_recipe
from redco_flow.recipes.starters import LENGTH, Starter, starters
from redco_flow.spec.data_files import missing_file
from redco_flow.spec.interpolation import escape
from redco_flow.spec.names import listed, nearest, shown, shown_path
from redco_flow.stages.preprocess.recognition import (
    FirstRows,
    Recognised,
    columns_of,
    left_out,
    read_head,
    recognise,
    size_of,
)

SCRATCH = "scratch"
_TEMPLATE_TOKENS = 64  # that a chat template puts around messages
_FEW_ROWS = 400
_LARGE_NUMBER = 10  # squared errors of larger ones dominate the first epochs
_BILLIONS = re.compile(r"(\d+(?:\.\d+)?)b(?![a-z])", re.IGNORECASE)
_SHARE_FOR_PARAMETERS = 0.7  # of a GPU's memory; the rest is for activations
_LORA = {"rank": 16, "alpha": 32, "targets": "all-linear"}


@dataclass(frozen=True)
class _Choice:
    """The recipe, model and devices, on which all sizes depend.

    Args:
        model: its name; empty from scratch.
        billions: of its parameters; 0: unknown, or few.
        memory_gib: of each GPU; None: unknown.
    """

    found: Recognised
    head: FirstRows
    model: str
    billions: float
    num_gpus: int
    memory_gib: float | None

    @property
    def starter(self) -> Starter:
        return starters()[self.found.recipe]

    @property
    def uses_lora(self) -> bool:
        return self.starter.uses_lora and bool(self.model)

    @property
    def are_few_rows(self) -> bool:
        return self.head.is_whole and self.head.num_rows < _FEW_ROWS

    @property
    def needed_gib(self) -> float:
        """Memory for a frozen bfloat16 base with factors, or for all parameters and AdamW."""
        return self.billions * (2.5 if self.uses_lora else 16.0)

    @property
    def num_model_shards(self) -> int:
        """The fewest GPUs, a power of two, whose memory holds the parameters."""
        shards, usable = 1, (self.memory_gib or 0.0) * _SHARE_FOR_PARAMETERS
        while usable and self.needed_gib > shards * usable and self.num_gpus % (2 * shards) == 0:
            shards *= 2
        return shards

    @property
    def num_replicas(self) -> int:
        """Copies of the model, each of which works on rows of its own."""
        return max(1, self.num_gpus // self.num_model_shards)

    @property
    def optional(self) -> list[str]:
        """The columns of the file that are read where there are some."""
        return [name for name in self.found.fit.optional if self.head.columns.get(name)]

    @property
    def empties(self) -> dict[str, int]:
        """The number of rows without a value, by column; `any` may be empty."""
        needed = (
            n for key, n in self.found.names.items() if self.found.fit.columns[key].kind != "any"
        )
        return {n: e for n in needed if (e := self.head.num_rows - len(self.head.columns[n]))}

    @property
    def lengths(self) -> dict[str, int]:
        """The tokens that the longest texts of the head need, as multiples of 8."""
        lengths = {}
        bytes_per_token = 3 if self.model else 2  # a vocabulary that is trained here is small
        for key, columns in self.starter.lengths.items():
            names = [self.found.names[c] for c in columns if c in self.found.names]
            texts = [
                self.head.columns[name] for name in (*names, *(self.optional if names else ()))
            ]
            num_bytes = sum(max(map(size_of, one), default=0) for one in texts)
            more = _TEMPLATE_TOKENS if key.endswith("max_length") else 8
            if texts:
                num_tokens = -(-(num_bytes // bytes_per_token + more) // 8) * 8
                lengths[key] = min(self.starter.max_tokens, num_tokens)
        return lengths


def ready_configurations() -> dict[str, tuple[str, str, str, str]]:
    """Return model, recipe, task and columns of each published model in the table, by name."""
    return {
        name: (model.name, recipe, starter.task, columns_of(recipe))
        for recipe, starter in starters().items()
        for name, model in starter.models.items()
    }


def first_pipeline(
    path: Path,
    *,
    name: str,
    recipe: str | None = None,
    model: str | None = None,
    ready: str | None = None,
    columns: Sequence[str] | None = None,
    num_gpus: int = 0,
    memory_gib: float | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Return a pipeline that trains on a file or folder, and lines about all that was chosen.

    Args:
        name: of the pipeline.
        recipe, columns: what the user says of the data; None: recognise it.
        model: hub id, folder, or `scratch`; None: the recipe's default.
        ready: a name from `ready_configurations`, whose recipe and model are the defaults.
        memory_gib: of each GPU; None: unknown.

    Raises:
        UsageError: the data cannot be read, or the columns do not decide on one recipe.
    """
    if model == "":
        raise UsageError("--model is empty: give a name on the hub, a folder, or `scratch`.")
    if ready is not None:
        known = ready_configurations()
        if ready not in known:
            raise UsageError(
                f"--from {ready}: there is no such configuration{nearest(ready, known)} "
                f"`redco-flow init --list` lists them: {listed(known)}."
            )
        model, recipe = model or known[ready][0], recipe or known[ready][1]
    head = read_head(path)
    found = recognise(path, head, recipe, columns)
    model, billions = _model(starters()[found.recipe], model, num_gpus)
    choice = _Choice(found, head, model, billions, num_gpus, memory_gib)
    prefix = "settings."
    settings = dict(choice.starter.settings if model else choice.starter.scratch_settings)
    settings |= {k.removeprefix(prefix): n for k, n in choice.lengths.items() if prefix in k}
    values = {
        "name": name,
        "recipe": found.recipe,
        **({"settings": settings} if settings else {}),
        "model": _model_section(choice),
        "data": _data(path, choice),
        "stages": _stages(choice, settings),
    }
    return values, list(_notes(path, choice))


def _model(starter: Starter, given: str | None, num_gpus: int) -> tuple[str, float]:
    """Return name and billions of parameters, 0 where they are unknown; no name of `scratch`."""
    if given == SCRATCH:
        return "", 0.0
    published = {one.name: one.billions for one in starter.models.values()}
    if given is None:
        given = next(iter(published)) if num_gpus else min(published, key=published.__getitem__)
    if is_folder(folder := expanded(given)):
        num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return str(folder.absolute()), num_bytes / 2e9
    if not is_hub_name(given):
        raise UsageError(f"--model: {missing_file(given, 'directory')}")
    size = _BILLIONS.search(given.rpartition("/")[2])
    return given, published.get(given) or float(size[1] if size else 0.0)


def _model_section(choice: _Choice) -> dict[str, Any]:
    if choice.model:
        dtype = {"dtype": "bfloat16"} if choice.num_gpus else {}
        return {"name_or_path": escape(choice.model), **dtype}
    length, scratch = sum(choice.lengths.values()) + 8, choice.starter.scratch
    config = {key: length if one == LENGTH else one for key, one in scratch["config"].items()}
    return {**scratch, "config": config}


def _data(path: Path, choice: _Choice) -> dict[str, Any]:
    found, head = choice.found, choice.head
    data: dict[str, Any] = {"dataset": str(expanded(path).absolute())}
    if head.delimiter:
        data["csv"] = {"delimiter": head.delimiter}
    data |= {key: name for key, name in found.names.items() if key.endswith("_key")}
    of_recipe = {k.partition("columns.")[2]: name for k, name in found.names.items()}
    if renamed := {key: name for key, name in of_recipe.items() if key not in ("", name)}:
        data["columns"] = renamed
    data |= found.fit.data
    fraction = 0.2 if choice.are_few_rows else 0.1
    absent = (split for split in ("validation", "test") if split not in head.splits)
    data |= {f"{split}_fraction": fraction for split in absent}
    skips_all = 100 * sum(choice.empties.values()) > head.num_rows
    data |= {"on_bad_row": "skip" if skips_all else {"skip": "1 %"}, **choice.starter.data}
    if not choice.model and choice.starter.lengths:
        data["tokenizer"] = {"train": {"vocab_size": 1024, "type": "bpe"}}
        data |= choice.starter.scratch_data
    escaped: dict[str, Any] = escape(data)
    return escaped


def _stages(choice: _Choice, settings: Mapping[str, Any]) -> dict[str, Any]:
    starter = choice.starter
    placed: dict[str, Any] = {"resources": {"gpus_per_host": choice.num_gpus}}
    if choice.num_model_shards > 1:
        placed["num_model_shards"] = choice.num_model_shards
    scored = {"batch_size": 16 * choice.num_replicas, **placed}
    if "text_key" in choice.found.names:  # a text of as many tokens would have no rest to predict
        scored["prompt_length"] = max(1, min(16, choice.lengths["max_target_length"] // 4 - 2))
    compared, reference = {}, {}
    if find_recipe(choice.found.recipe).compares(settings):
        compared = {"reference_scores": "reference"}
        of_dataset = {"kind": "reference_scores", "dataset": "preprocess"}
        reference = {"reference": {**of_dataset, **scored}}
    train: dict[str, Any] = {
        **_amounts(choice),
        **starter.train,
        "learning_rate": starter.learning_rates[not choice.model],
        "schedule": {"type": "cosine", "warmup_ratio": 0.1},
        "weight_decay": 0.01,
        "eval": {**starter.train.get("eval", {}), "num_examples": 500},
        "keep": {"last": 1, "best": [starter.best]},
    }
    if choice.uses_lora:
        train["lora"] = _LORA
        if choice.num_gpus:
            train["frozen_dtype"] = "bfloat16"
    return {
        "preprocess": {key: n for key, n in choice.lengths.items() if "." not in key},
        **reference,
        "train": {**train, **compared, **placed},
        "predict": {"checkpoint": f"best/{starter.best}", **compared, **scored},
        "evaluate": {"metrics": starter.metrics},
    }


def _amounts(choice: _Choice) -> dict[str, int]:
    """Return epochs and batch sizes."""
    num_epochs, per_device = 3, 8
    if choice.uses_lora:
        num_epochs, per_device = 2, max(1, min(8, 4096 // sum(choice.lengths.values())))
    elif not choice.model and choice.head.is_whole:
        num_epochs = min(20, max(3, 6000 // choice.head.num_rows))
    at_once = per_device * choice.num_replicas
    amounts = {
        "num_epochs": num_epochs,
        "global_batch_size": at_once * max(1, (8 if choice.are_few_rows else 32) // at_once),
    }
    return {**amounts, "per_device_batch_size": per_device} if choice.uses_lora else amounts


def _notes(path: Path, choice: _Choice) -> Iterator[str]:
    found, head, shards = choice.found, choice.head, choice.num_model_shards
    how = (
        f"{key} is {shown(name)} (by its {'name' if name in found.by_name else 'values'})"
        for key, name in found.names.items()
    )
    yield f"recognised: {found.recipe}, {choice.starter.task}; {', '.join(how)}"
    if choice.optional:
        yield f"read too: {', '.join(map(shown, choice.optional))}"
    if unused := left_out(head, found):
        yield f"not used: {', '.join(map(shown, unused))}"
    for name, number in choice.empties.items():
        yield f"{shown(name)} is empty in {number:,} rows, which are left out"
    yield from _notes_on_target(choice)
    which = "all" if head.is_whole else "the first"
    yield f"looked at: {which} {head.num_rows:,} rows of {shown_path(str(path))}"
    size = f", {choice.billions * 1000:,.0f} million parameters" if choice.billions else ""
    model = shown_path(choice.model) if choice.model else "small, from random parameters"
    yield f"model: {model}{size}{', trained by LoRA' * choice.uses_lora}"
    shares = f", {shards} of which share the model" if shards > 1 else ""
    yield f"devices: {choice.num_gpus or 'no'} NVIDIA GPUs seen{shares}"
    most = choice.starter.max_tokens
    if lengths := [
        f"{key.rpartition('.')[2]} {n}{' (capped)' * (n == most)}"
        for key, n in choice.lengths.items()
    ]:
        yield f"lengths in tokens, for the longest of these texts: {', '.join(lengths)}"
    if choice.model and not choice.num_gpus:
        yield "without a GPU this can take hours; --model scratch writes a small model"
    if choice.memory_gib and choice.needed_gib > shards * choice.memory_gib:
        needed = choice.needed_gib / shards
        yield f"it may not fit: {needed:.0f} GiB for a GPU of {choice.memory_gib:.0f} GiB"


def _notes_on_target(choice: _Choice) -> Iterator[str]:
    """Yield what makes numbers or classes hard to learn."""
    names, recipe = choice.found.names, choice.found.recipe
    target = names.get("target_key") or names.get("columns.label", "")
    values = choice.head.columns.get(target, [])
    if recipe == "regression":
        mean, deviation = fmean(map(float, values)), pstdev(map(float, values))
        if max(abs(mean), deviation) > _LARGE_NUMBER:
            yield (
                f"{shown(target)} has mean {mean:.4g} and deviation {deviation:.4g}, and numbers "
                "are learnt as they are: scale them in the file to about 1"
            )
    elif recipe.endswith("classification") and len(set(values)) == 1:
        yield f"{shown(target)} is {shown(values[0])} in all these rows"

"""nanoGPT's recipe for characters: our pipeline beside a plain torch loop on the same windows.

    python benchmarks/char_lm.py [--seeds 0 1 2] [--num_steps 2000] [--num_threads 2]

Runs pipelines/char_lm.yaml once for each seed, then trains transformers' GPT-2 of the same config
with torch, from torch's own initial parameters: same windows, optimizer, schedule and clipping.
Both are scored on the same windows of the validation split. Prints a line per training and one
JSON line last. Needs the extra `reference`.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers

from redco_flow.engine.data.order import BatchSampler, Mixture
from redco_flow.spec.load import load_pipeline
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.train.config import Config
from redco_flow.stages.train.windows import Span, TokenStream, Windows
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.workspace import Workspace

PROJECT = Path(__file__).resolve().parents[1]
PIPELINE = PROJECT / "pipelines" / "char_lm.yaml"


def run_pipeline(folder: Path, seed: int, num_steps: int) -> tuple[float, float, DatasetArtifact]:
    """Train with redco-flow; return the last validation loss, the seconds, and the dataset."""
    settings = [f"stages.train.seed={seed}", f"stages.train.max_steps={num_steps}"]
    command = [
        sys.executable, "-m", "redco_flow.cli.main", "run", str(PIPELINE), *settings,
        "--until", "train", "--json",
    ]  # fmt: skip
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.perf_counter() - start
    run = json.loads(done.stdout.splitlines()[-1])["run"]
    workspace = folder / "redco-workspace"
    state = json.loads((workspace / "runs" / run / "state.json").read_text())
    stages = state["stages"]
    artifact = ArtifactStore(Workspace.open(workspace)).find(
        stages["preprocess"]["artifacts"]["dataset"]
    )
    assert artifact is not None
    return stages["train"]["metrics"]["eval_loss"], seconds, DatasetArtifact(artifact.path)


def windows_of(dataset: DatasetArtifact, split: str, length: int, *, everywhere: bool) -> Windows:
    """Return the windows that the train stage has of a split."""
    stream = TokenStream(dataset.split(split, ["target_ids"]).flat("target_ids"))
    spans = [Span(f"the {split} split", 0, len(stream))]
    return Windows(stream, spans, length, at_every_token=everywhere)


def tensors(windows: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels (B, T) of windows of one length."""
    ids = np.stack([np.concatenate([one["source_ids"], one["target_ids"]]) for one in windows])
    found = torch.tensor(ids, dtype=torch.int64)
    return found[:, :-1], found[:, 1:]


def learning_rate(config: Config, step: int, num_steps: int) -> float:
    """Return the rate of a step, from 0: a linear warmup, then half a cosine to the least one."""
    schedule = config.schedule
    warmup = min(schedule.warmup_steps, num_steps)
    if step < warmup:
        return config.learning_rate * step / warmup
    done = (step - warmup) / (num_steps - warmup)
    share = 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * (schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * share)


def batches(config: Config, windows: Windows, seed: int, num_steps: int) -> Iterator[list[dict]]:
    """Yield the windows of each step."""
    sampler = BatchSampler(
        len(windows), config.global_batch_size, seed, order=Mixture(windows.parts())
    )
    for step in range(num_steps):
        yield [windows[int(row)] for row in sampler.rows(step)[0]]


def train_torch(
    config: Config, dataset: DatasetArtifact, seed: int, num_steps: int
) -> tuple[float, float]:
    """Train with torch; return the validation loss after the last step, and the seconds."""
    torch.manual_seed(seed)
    ends = {f"{name}_token_id": dataset.tokenizer.eos_id for name in ("bos", "eos")}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            **config.model.config, **ends, vocab_size=dataset.tokenizer.vocab_size
        )
    )
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=tuple(config.betas),
    )
    length = config.batching.window_length
    windows = windows_of(dataset, "train", length, everywhere=True)
    start = time.perf_counter()
    model.train()
    for step, batch in enumerate(batches(config, windows, seed, num_steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, num_steps)
        inputs, labels = tensors(batch)
        logits = model(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, config.max_grad_norm)
        optimizer.step()
    seconds = time.perf_counter() - start
    return evaluate(model, windows_of(dataset, "validation", length, everywhere=False)), seconds


@torch.no_grad()
def evaluate(model: transformers.GPT2LMHeadModel, windows: Windows) -> float:
    """Return the mean loss over all tokens that the windows predict."""
    model.eval()
    total, count = 0.0, 0
    full = [one for one in windows if len(one["target_ids"]) == len(windows[0]["target_ids"])]
    rest = windows[-1:] if len(full) < len(windows) else []
    for chunk in [*(full[start : start + 64] for start in range(0, len(full), 64)), rest]:
        if chunk:
            inputs, labels = tensors(chunk)
            logits = model(inputs).logits.flatten(0, 1)
            total += float(
                torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
            )
            count += labels.numel()
    return total / count


def main() -> None:
    """Run all trainings and print what they came to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num_steps", type=int, default=2000)
    parser.add_argument("--num_threads", type=int, default=torch.get_num_threads(), help="torch's")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.num_threads)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="char_lm-"))
    folder.mkdir(parents=True, exist_ok=True)
    config = load_pipeline(PIPELINE).stages["train"].config
    losses: dict[str, list[float]] = {"redco_flow": [], "torch": []}
    for seed in arguments.seeds:
        ours, seconds, dataset = run_pipeline(folder, seed, arguments.num_steps)
        print(f"seed {seed}: redco-flow {ours:.4f} in {seconds:.0f} s", flush=True)
        theirs, seconds = train_torch(config, dataset, seed, arguments.num_steps)
        print(f"seed {seed}: torch      {theirs:.4f} in {seconds:.0f} s", flush=True)
        losses["redco_flow"].append(ours)
        losses["torch"].append(theirs)
    means = {name: statistics.mean(found) for name, found in losses.items()}
    print(json.dumps({"losses": losses, "means": means, "num_steps": arguments.num_steps}))


if __name__ == "__main__":
    main()

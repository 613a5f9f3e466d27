"""What a run costs when every stage's result is there already.

    python benchmarks/second_run.py [--repeats 5]

Makes one run of a small pipeline (preprocess, train, predict, evaluate), then times
`redco-flow run` of the unchanged pipeline, without a Prefect server. Prints one JSON line last.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PIPELINE = """\
name: second_run
recipe: text_to_text
model: {family: t5, config: {d_model: 32, d_kv: 8, num_heads: 4, d_ff: 64, num_layers: 1}}
data:
  dataset: rows.jsonl
  source_key: source
  target_key: target
  validation_fraction: 0.2
  test_fraction: 0.2
  tokenizer: {train: {vocab_size: 270, type: bpe}}
stages:
  preprocess: {max_source_length: 16, max_target_length: 16}
  train: {num_epochs: 1, global_batch_size: 8}
  predict: {checkpoint: last}
  evaluate: {metrics: [exact_match, bleu]}
"""


def run(words: list[str], folder: Path) -> tuple[float, str]:
    """Return the seconds a command takes and what it prints."""
    start = time.perf_counter()
    done = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True)
    return time.perf_counter() - start, done.stdout


def measure(folder: Path, repeats: int) -> dict[str, object]:
    """Return the figures; the first run is not among them."""
    command = [sys.executable, "-m", "redco_flow.cli.main", "run", "second_run.yaml", "--json"]
    run(command, folder)
    whole = []
    for _ in range(repeats):
        seconds, said = run(command, folder)
        stages = json.loads(said)["stages"].values()
        assert all(stage["reused"] for stage in stages), said
        whole.append(seconds)
    return {"seconds": round(statistics.median(whole), 2), "repeats": repeats}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as folder:
        os.environ["REDCO_FLOW_HOME"] = f"{folder}/home"
        rows = [{"source": f"a b {n}", "target": f"{n} b a"} for n in range(100)]
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (Path(folder) / "rows.jsonl").write_text(text)
        (Path(folder) / "second_run.yaml").write_text(PIPELINE)
        figures = measure(Path(folder), repeats)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

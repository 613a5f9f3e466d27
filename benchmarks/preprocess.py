"""How near preprocessing comes to the bare tokenizer, and whether its memory stays flat.

    python benchmarks/preprocess.py [--rows 60000] [--rounds 12]

Rows of English-like text (about 60 source and 20 target tokens, of 100,000 different words) stand
in a JSONL file, and a tokenizer is trained on the first of them once, by the stage's own trainer.
Two processes stay there all the time, and each round times both once, one right after the other;
the order is turned round from round to round, so that a drift of the machine's speed is on
neither's side:

- the stage: `preprocess.run` with that tokenizer's directory: digest the file, read, check, hold
  out, encode, write Arrow, into an empty directory;
- the bare encoder: `Tokenizer.encode_batch_fast` over the same texts, held in memory, in lists of
  1000; its ids are not even read.

Both encode in `threads` threads of the tokenizer, and load it anew in each round (the encoder
before its clock starts). Libraries are imported before, and transformers and pyarrow, which import
more as they are first used, are used once.

`ratio_tokenizers` is the median of the rounds' ratios of tokens per second (the stage's over the
encoder's; the end tokens count for neither), `quartiles` are the others of them; `ratio_cpu` is
the median of the ratios of tokens per processor second, which a busy machine disturbs less.
`seconds_…` and `cpu_seconds_…` are medians, and `spread_encoder` is the slowest of the encoder's
rounds over its fastest: how far the machine itself is to be believed. `peak_rss_mib_10x` is the
peak over ten times the rows of `peak_rss_mib`, which is that of 20,000 rows, a whole block. Prints
one JSON line last.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

BATCH_ROWS = 1000
LENGTHS = {"max_source_length": 512, "max_target_length": 128}
MEMORY_ROWS = 20_000
NUM_WORDS = 100_000
TRAINING_ROWS = 10_000
VOCAB_SIZE = 8_000

Measure = Callable[[], dict[str, float]]
"""Measures once; returns seconds, processor seconds, and what else is of interest."""


def word(rng: random.Random) -> str:
    """One to four syllables."""
    num_syllables = rng.choice((1, 1, 2, 2, 3, 4))
    syllables = zip(
        rng.choices("bcdfghjklmnprstvw", k=num_syllables),
        rng.choices("aeiou", k=num_syllables),
        rng.choices(("", "", "n", "r", "s", "t"), k=num_syllables),
        strict=True,
    )
    return "".join(part for syllable in syllables for part in syllable)


def write_rows(path: Path, num_rows: int) -> None:
    """Write rows whose words are as unequally frequent as a language's (Zipf's law)."""
    rng = random.Random(0)
    words = [word(rng) for _ in range(NUM_WORDS)]
    weights = list(accumulate(1 / rank for rank in range(1, NUM_WORDS + 1)))

    def sentence(shortest: int, longest: int) -> str:
        chosen = rng.choices(words, cum_weights=weights, k=rng.randint(shortest, longest))
        return " ".join(chosen).capitalize() + "."

    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_rows):
            row = {"source": sentence(37, 68), "target": sentence(12, 24)}
            file.write(json.dumps(row) + "\n")


def texts(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield row["source"], row["target"]


def train(path: Path, tokenizer: Path, kind: Any) -> None:
    from redco_flow.stages.preprocess.tokenizer import save_tokenizer, train_tokenizer

    first = [
        text for pair, _ in zip(texts(path), range(TRAINING_ROWS), strict=False) for text in pair
    ]
    save_tokenizer(train_tokenizer(first, VOCAB_SIZE, kind), tokenizer)


def stage_run(path: Path, tokenizer: Path) -> Measure:
    """Return what runs the stage once."""
    import pyarrow
    from transformers import AutoTokenizer

    from redco_flow.runtime.context import StageContext
    from redco_flow.stages.preprocess.config import Config
    from redco_flow.stages.preprocess.run import run
    from redco_flow.tracking.attempt import AttemptDirectory

    given = {"train": str(path), "tokenizer": {"name_or_path": str(tokenizer)}}
    config = Config.from_json({"data": given, **LENGTHS})
    AutoTokenizer.from_pretrained(tokenizer)
    pyarrow.array([0])

    def measure() -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            context = StageContext(
                run="benchmark",
                stage="preprocess",
                fingerprint="0" * 64,
                inputs={},
                work_dir=Path(folder),
                attempt_dir=AttemptDirectory(Path(folder)),
            )
            start, cpu_start = time.perf_counter(), time.process_time()
            outputs = run(context, config)
            times = {
                "seconds": time.perf_counter() - start,
                "cpu_seconds": time.process_time() - cpu_start,
            }
        splits = outputs.outputs["dataset"].metadata["splits"].values()
        ended = sum(split["source_tokens"] + split["target_tokens"] for split in splits)
        ends = 2 * sum(split["rows"] for split in splits)
        return {**times, "tokens": ended - ends, "peak_rss_mib": peak_rss_mib()}

    return measure


def encoder_run(path: Path, tokenizer: Path) -> Measure:
    """Return what encodes all texts once with the bare encoder."""
    from tokenizers import Tokenizer

    sides = [list(side) for side in zip(*texts(path), strict=True)]
    starts = range(0, len(sides[0]), BATCH_ROWS)
    batches = [side[start : start + BATCH_ROWS] for start in starts for side in sides]

    def measure() -> dict[str, float]:
        backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        start, cpu_start = time.perf_counter(), time.process_time()
        for batch in batches:
            backend.encode_batch_fast(batch, add_special_tokens=False)
        return {
            "seconds": time.perf_counter() - start,
            "cpu_seconds": time.process_time() - cpu_start,
        }

    return measure


def peak_rss_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


RUNS: dict[str, Callable[[Path, Path], Measure]] = {"stage": stage_run, "encoder": encoder_run}


class Child:
    """A process of its own that measures whenever it is asked; a context manager."""

    def __init__(self, kind: str, path: Path, tokenizer: Path, threads: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", kind, str(path), str(tokenizer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "RAYON_NUM_THREADS": str(threads)},
        )
        self._line()  # it is ready

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def measure(self) -> dict[str, float]:
        """Measure once, in that process."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        figures: dict[str, float] = json.loads(self._line())
        return figures

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a measuring process ended with {self._process.wait()}; see above.")
        return line


def serve(kind: str, path: Path, tokenizer: Path) -> None:
    """Be a `Child`'s process."""
    measure = RUNS[kind](path, tokenizer)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


def measure_all(folder: Path, num_rows: int, rounds: int, kind: str) -> dict[str, object]:
    """Return the figures of all rounds."""
    path, tokenizer = folder / "rows.jsonl", folder / "tokenizer"
    threads = len(os.sched_getaffinity(0))
    write_rows(path, num_rows)
    train(path, tokenizer, kind)
    stage, encoder = alternating(path, tokenizer, threads, rounds)
    ratios = quotients(encoder, stage, "seconds")
    lower, median, upper = statistics.quantiles(ratios, method="inclusive")
    seconds = [figures["seconds"] for figures in encoder]
    return {
        "tokens_per_second": round(statistics.median(f["tokens"] / f["seconds"] for f in stage)),
        "ratio_tokenizers": round(median, 3),
        "quartiles": [round(lower, 3), round(upper, 3)],
        "ratio_cpu": round(statistics.median(quotients(encoder, stage, "cpu_seconds")), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        **medians("stage", stage),
        **medians("encoder", encoder),
        "spread_encoder": round(max(seconds) / min(seconds), 3),
        **memory(folder, tokenizer, threads),
        "tokenizer": kind,
        "threads": threads,
        "rows": num_rows,
        "tokens": stage[0]["tokens"],
        "rounds": rounds,
    }


def alternating(
    path: Path, tokenizer: Path, threads: int, rounds: int
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return the stage's figures and the encoder's, round by round."""
    found: dict[str, list[dict[str, float]]] = {"stage": [], "encoder": []}
    with (
        Child("stage", path, tokenizer, threads) as stage,
        Child("encoder", path, tokenizer, threads) as encoder,
    ):
        children = {"stage": stage, "encoder": encoder}
        for index in range(rounds):
            for name in ("stage", "encoder") if index % 2 else ("encoder", "stage"):
                found[name].append(children[name].measure())
    return found["stage"], found["encoder"]


def quotients(
    over: list[dict[str, float]], under: list[dict[str, float]], name: str
) -> list[float]:
    """Divide one figure, round by round."""
    return [a[name] / b[name] for a, b in zip(over, under, strict=True)]


def medians(name: str, figures: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians of one side's times."""
    return {
        f"{key}_{name}": round(statistics.median(f[key] for f in figures), 3)
        for key in ("seconds", "cpu_seconds")
    }


def memory(folder: Path, tokenizer: Path, threads: int) -> dict[str, float]:
    """Return the stage's peak over MEMORY_ROWS, and over ten times as many."""
    peaks = []
    for num_rows in (MEMORY_ROWS, 10 * MEMORY_ROWS):
        path = folder / f"{num_rows}.jsonl"
        write_rows(path, num_rows)
        with Child("stage", path, tokenizer, threads) as stage:
            peaks.append(stage.measure()["peak_rss_mib"])
    return {
        "peak_rss_mib": round(peaks[0]),
        "peak_rss_mib_10x": round(peaks[1]),
        "ratio_peak_rss": round(peaks[1] / peaks[0], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--rounds", type=int, default=12, help="at least 2")
    parser.add_argument("--tokenizer", choices=("unigram", "bpe"), default="unigram")
    parser.add_argument("--child", nargs=3, metavar=("KIND", "DATA", "TOKENIZER"))
    given = parser.parse_args()
    if given.child:
        kind, path, tokenizer = given.child
        serve(kind, Path(path), Path(tokenizer))
        return
    with tempfile.TemporaryDirectory(prefix="redco-flow-preprocess-") as folder:
        print(json.dumps(measure_all(Path(folder), given.rows, given.rounds, given.tokenizer)))


if __name__ == "__main__":
    main()

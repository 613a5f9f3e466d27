"""Bytes of gradients that a train step sends between data shards, and whether computing goes on.

    python benchmarks/gradient_reductions.py --model llama [--num-data-shards 4] [--num-micro 1]
        [--target gpu]

Compiles the whole train step of `collectives.py`'s models with whole parameters on every data
shard, from shapes alone, and reads the optimised HLO. The optimum is each gradient's bytes once a
step, 2(n-1)/n of them, however many micro-batches there are. A reduction is overlapped where other
work is scheduled between its start and its end; that is written in the HLO for GPUs, while those
for CPUs and TPUs do not show it. Prints one JSON line last.
"""

import argparse
import json
import re
from typing import Any

import optax
from collectives import CASES, COMPILED_FOR
from compile_targets import TARGETS, find_devices

from redco_flow import Deployer
from redco_flow.engine.compiled_step import lower_train_step
from redco_flow.engine.traffic import wire_bytes

_START = re.compile(r"^\s+%([\w.\-]+) = .* all-reduce-start\(")
_END = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+ = .* all-reduce-done\(\S*?%?([\w.\-]+)\)")
_REDUCTION = re.compile(r" all-reduce(?:-start)?\(")


def compile_step(name: str, num_data_shards: int, num_micro: int) -> tuple[str, int]:
    """Return the optimised HLO of the whole train step, and the parameters' bytes."""
    case = CASES[name]()
    deployer = Deployer(devices=find_devices(COMPILED_FOR, num_data_shards))
    rules = deployer.get_sharding_rules(case.params, case.loss_fn, case.batch, None, False)
    lowered = lower_train_step(
        deployer, case.loss_fn, case.params, optax.adamw(1e-3), rules, case.batch,
        num_micro=num_micro, max_grad_norm=1.0,
    )  # fmt: skip
    return lowered.compile().as_text(), rules.total_bytes


def num_overlapped(hlo_text: str) -> int:
    """Count the reductions that end later than right after their start."""
    started: dict[str, int] = {}
    found = 0
    for number, line in enumerate(hlo_text.splitlines()):
        if start := _START.match(line):
            started[start[1]] = number
        elif end := _END.match(line):
            found += number > started.get(end[1], number) + 1
    return found


def measure(name: str, num_data_shards: int, num_micro: int) -> dict[str, Any]:
    hlo_text, num_bytes = compile_step(name, num_data_shards, num_micro)
    optimum = 2 * (num_data_shards - 1) / num_data_shards * num_bytes
    sent = wire_bytes(hlo_text)
    return {
        "model": name,
        "target": COMPILED_FOR,
        "num_data_shards": num_data_shards,
        "num_micro": num_micro,
        "bytes": round(sent),
        "optimum_bytes": round(optimum),
        "ratio": round(sent / optimum, 4),
        "num_reductions": len(_REDUCTION.findall(hlo_text)),
        "num_overlapped": num_overlapped(hlo_text),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(CASES), default="llama")
    parser.add_argument("--num-data-shards", type=int, default=4, choices=(2, 4, 8))
    parser.add_argument("--num-micro", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--target", choices=TARGETS, default="cpu", help="whose compiler")
    options = parser.parse_args()
    print(json.dumps(measure(options.model, options.num_data_shards, options.num_micro)))


if __name__ == "__main__":
    main()

"""Bytes of gradients that a train step sends between data shards, and whether computing goes on.

    python benchmarks/gradient_reductions.py --model llama [--num-data-shards 4]
        [--num-context-shards 1] [--num-micro 1] [--target gpu]

Compiles the whole train step of `collectives.py`'s models with whole parameters on every data
shard, from shapes alone, and reads the optimised HLO. The optimum is each gradient's bytes once a
step, 2(n-1)/n of them, however many micro-batches there are; what context shards send each other
is told apart, as `context_bytes`. A reduction is overlapped where other
work is scheduled between its start and its end; that is written in the HLO for GPUs, while those
for CPUs and TPUs do not show it. Prints one JSON line last.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import optax

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.engine.traffic

from collectives import BATCH, CASES, COMPILED_FOR
from compile_targets import TARGETS, find_devices

from redco_flow import Deployer
from redco_flow.engine.training_plan import TrainingPlan
from tests.engine.traffic import read_collectives

_START = re.compile(r"^\s+%([\w.\-]+) = .* all-reduce-start\(")
_END = re.compile(r"^\s+(?:ROOT )?%[\w.\-]+ = .* all-reduce-done\(\S*?%?([\w.\-]+)\)")
_REDUCTION = re.compile(r" all-reduce(?:-start)?\(")


def compile_step(options: argparse.Namespace) -> tuple[str, int]:
    """Return the optimised HLO of the whole train step, and the parameters' bytes."""
    case = CASES[options.model]()
    num_devices = options.num_data_shards * options.num_context_shards
    deployer = Deployer(
        num_context_shards=options.num_context_shards,
        devices=find_devices(COMPILED_FOR, num_devices),
    )
    rules = deployer.get_sharding_rules(case.params, case.loss_fn, case.batch, None, False)
    plan = TrainingPlan(
        deployer,
        loss_fn=case.loss_fn,
        params=case.params,
        optimizer=optax.adamw(1e-3),
        sharding_rules=rules,
        global_batch_size=BATCH * options.num_micro,
        per_device_batch_size=BATCH // deployer.num_data_shards,
        max_grad_norm=1.0,
        batch=case.batch,
    )
    return plan.compile().as_text(), rules.total_bytes


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


def measure(options: argparse.Namespace) -> dict[str, Any]:
    hlo_text, num_bytes = compile_step(options)
    share = (options.num_data_shards - 1) / options.num_data_shards
    optimum = 2 * share * num_bytes
    found = read_collectives(hlo_text)
    # There are fewer context shards than data shards, which tells their groups apart.
    within = sum(one.wire_bytes for one in found if one.group_size < options.num_data_shards)
    sent = sum(one.wire_bytes for one in found) - within
    return {
        "model": options.model,
        "target": COMPILED_FOR,
        "num_data_shards": options.num_data_shards,
        "num_context_shards": options.num_context_shards,
        "num_micro": options.num_micro,
        "bytes": round(sent),
        "optimum_bytes": round(optimum),
        "ratio": round(sent / optimum, 4),
        "context_bytes": round(within),
        "num_reductions": len(_REDUCTION.findall(hlo_text)),
        "num_overlapped": num_overlapped(hlo_text),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(CASES), default="llama")
    parser.add_argument("--num-data-shards", type=int, default=4, choices=(2, 4, 8))
    parser.add_argument("--num-context-shards", type=int, default=1, choices=(1, 2))
    parser.add_argument("--num-micro", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--target", choices=TARGETS, default="cpu", help="whose compiler")
    options = parser.parse_args()
    if options.num_context_shards == 2 and options.num_data_shards != 4:
        parser.error("--num-context-shards 2 goes with --num-data-shards 4.")
    print(json.dumps(measure(options)))


if __name__ == "__main__":
    main()

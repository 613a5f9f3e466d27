"""Step time over two groups of hosts with a slow link between them: predicted, and measured.

    python benchmarks/fabrics.py [--num-steps 5] [--megabits 100]      (as root: network namespaces)

Four hosts are namespaces of this machine. Each has a fast link to the other host of its group, and
one of so many megabits to the hosts of the other group. A small LLaMA is trained over them by one
process each, on each mesh and in two orders of hosts: group after group, as jobs of this project
are placed, and in turns. Prints one JSON line for each placement: the seconds that its collectives
take by `engine.step.links`, by which axis and link, and the median of its measured steps; then
how the fastest by prediction compares with the fastest measured, and how many pairs of placements,
of those whose predictions differ by 5 %, are in the wrong order.
"""

import argparse
import contextlib
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GROUPS = ((0, 1), (2, 3))
NUM_HOSTS = 4
PORT = 7651
ORDERS = {"group after group": (0, 1, 2, 3), "in turns": (0, 2, 1, 3)}
MESHES = ({}, {"fsdp": 2}, {"fsdp": 4}, {"model": 2}, {"fsdp": 2, "model": 2}, {"model": 4})
LATENCY_US = 100.0
ALIKE = 1.05
LLAMA = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip


def run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


@contextlib.contextmanager
def hosts(megabits: int) -> Iterator[list[str]]:
    """Make the namespaces; yield their names."""
    mark = secrets.token_hex(2)
    names = [f"rf{mark}{host}" for host in range(NUM_HOSTS)]
    bridges = [*(f"rfb{mark}{group}" for group in range(len(GROUPS))), f"rfs{mark}"]
    try:
        for bridge in bridges:
            run("ip", "link", "add", bridge, "type", "bridge")
            run("ip", "link", "set", bridge, "up")
        for host, name in enumerate(names):
            run("ip", "netns", "add", name)
            (group,) = (number for number, members in enumerate(GROUPS) if host in members)
            for link, bridge in (("fast", bridges[group]), ("slow", bridges[-1])):
                outside = f"rf{link[0]}{mark}{host}"
                run("ip", "link", "add", outside, "type", "veth", "peer", "name", link,
                    "netns", name)  # fmt: skip
                run("ip", "link", "set", outside, "master", bridge, "up")
                run("ip", "-n", name, "link", "set", link, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "address", "add", f"{address(host)}/32", "dev", "lo")
            for other in {*range(NUM_HOSTS)} - {host}:
                link = "fast" if other in GROUPS[group] else "slow"
                run("ip", "-n", name, "route", "add", address(other), "dev", link,
                    "src", address(host))  # fmt: skip
            run("tc", "-n", name, "qdisc", "add", "dev", "slow", "root", "tbf",
                "rate", f"{megabits}mbit", "burst", "64kb", "latency", "400ms")  # fmt: skip
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            known = [f"{address(one)} host{one}" for one in range(NUM_HOSTS)]
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
            with contextlib.suppress(OSError):
                (Path("/etc/netns") / name / "hosts").unlink()
                (Path("/etc/netns") / name).rmdir()
        for bridge in bridges:
            subprocess.run(["ip", "link", "delete", bridge], stderr=subprocess.DEVNULL)


def measure(rank: int, num_steps: int, megabits: int) -> None:
    """Train on each placement; rank 0 prints what it takes."""
    import jax
    import numpy as np
    import optax

    from redco_flow import Deployer, Trainer
    from redco_flow.engine.devices import find_device
    from redco_flow.engine.step.links import Fabrics, Links, find_traffic
    from redco_flow.engine.step.loss import cross_entropy
    from redco_flow.engine.step.program import Program
    from redco_flow.models.find import find_model

    jax.distributed.initialize(f"{address(0)}:{PORT}", NUM_HOSTS, rank)
    llama = find_model("llama")
    config = llama.Config.from_hugging_face(LLAMA)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: 0.1 * rng.normal(size=leaf.shape).astype(np.float32),
        llama.abstract_params(config),
    )
    rows = list(rng.integers(0, 1024, (8, 64)).astype(np.int32))

    def collate(rows: list[Any]) -> dict[str, Any]:
        return {"ids": np.stack(rows)}

    def loss(params: Any, batch: Any, rngs: Any, is_training: bool) -> Any:
        logits = llama.apply(config, params, batch["ids"])
        return cross_entropy(logits[:, :-1], batch["ids"][:, 1:])

    group_of = [number for number, members in enumerate(GROUPS) for _ in members]
    fabrics = Fabrics(group_of, megabits / 8000, LATENCY_US)
    # Only its links count: the fast one has no limit but the processors that copy.
    device = find_device("h100")
    for order, places in ORDERS.items():
        for mesh in MESHES:
            deployer = Deployer(
                mesh.get("model", 1),
                num_fsdp_shards=mesh.get("fsdp", 1),
                devices=[jax.devices()[place] for place in places],
            )
            rules = deployer.get_sharding_rules(params, loss, collate(rows), None, False)
            trainer = Trainer(
                deployer,
                collate_fn=collate,
                loss_fn=loss,
                params=params,
                optimizer=optax.adamw(1e-4),
                sharding_rules=rules,
                global_batch_size=len(rows),
            )
            program = Program(trainer.plan.compile(collate(rows)).as_text() or "")
            links = Links(device, places, 1.0, fabrics)
            traffic = find_traffic(program, links, deployer.mesh.shape)
            seconds = []
            with trainer.read_batches(rows, 0, 1) as batches:
                (batch,) = trainer.device_batches(batches)
                for _ in range(num_steps + 1):
                    begun = time.monotonic()
                    jax.device_get(trainer.advance(batch))
                    seconds.append(time.monotonic() - begun)
            if rank == 0:
                found = {
                    "order": order,
                    "mesh": {"data": NUM_HOSTS // max(1, int(np.prod([*mesh.values()]))), **mesh},
                    "predicted_seconds": sum(one.seconds for one in traffic),
                    "measured_seconds": statistics.median(seconds[1:]),
                    "traffic": [vars(one) for one in traffic],
                }
                print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time over two groups of hosts.")
    parser.add_argument("--num-steps", type=int, default=5)
    parser.add_argument("--megabits", type=int, default=100)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        measure(options.rank, options.num_steps, options.megabits)
        return
    with hosts(options.megabits) as names, tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "",
            "JAX_COMPILATION_CACHE_DIR": cache,  # each step is compiled to be read, and to run
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }  # fmt: skip
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c",
                 f'hostname host{rank} && exec "$@"', "sh", sys.executable, __file__,
                 "--rank", str(rank), "--num-steps", str(options.num_steps),
                 "--megabits", str(options.megabits)],
                env=environment, stdout=None if rank else subprocess.PIPE, text=True,
            )
            for rank, name in enumerate(names)
        ]  # fmt: skip
        rows = []
        assert ranks[0].stdout is not None
        try:
            for line in ranks[0].stdout:
                if line.startswith("{"):  # Gloo prints there, too
                    print(line, end="", flush=True)
                    rows.append(json.loads(line))
            if any(codes := [one.wait() for one in ranks]):
                sys.exit(f"the ranks ended with {codes}.")
        finally:
            for one in ranks:
                one.kill()
    chosen, best = (
        min(rows, key=lambda row: row[f"{kind}_seconds"]) for kind in ("predicted", "measured")
    )
    pairs = [
        sorted(pair, key=lambda row: row["predicted_seconds"])
        for pair in itertools.combinations(rows, 2)
    ]
    differing = [
        (fast, slow)
        for fast, slow in pairs
        if slow["predicted_seconds"] > ALIKE * fast["predicted_seconds"]
    ]
    print(
        json.dumps(
            {
                "chosen": [chosen["order"], chosen["mesh"]],
                "fastest": [best["order"], best["mesh"]],
                "ratio": chosen["measured_seconds"] / best["measured_seconds"],
                "pairs": len(differing),
                "in_wrong_order": sum(
                    fast["measured_seconds"] > slow["measured_seconds"] for fast, slow in differing
                ),
            }
        )
    )


if __name__ == "__main__":
    main()

"""What one NVIDIA GPU that is there reaches: attention, training, factors, decoding.

    python benchmarks/gpu.py attention [--shapes 8x2048 2x8192] [--head-dim 128]
    python benchmarks/gpu.py train [--shape 1b] [--rows 8] [--length 2048] [--remat minimal]
                                   [--packed] [--attention triton] [--torch]
    python benchmarks/gpu.py factors [--shape 1b]
    python benchmarks/gpu.py decode [--shape 8b] [--torch]

`attention`: forward and backward pass of causal attention (32 heads, 8 key-value heads, bfloat16)
by each kernel, plain and of packed rows; TFLOP/s count the half of the scores that is seen.
`train`: `Trainer.fit` of a LLaMA in bfloat16 with float32 parameters and AdamW, on texts of full
length, without reading files; `--torch` trains transformers' model of the same config beside it
(autocast to bfloat16, fused AdamW, SDPA; eager and by torch.compile). `factors`: the same with LoRA
beside each kind of base. `decode`: 256 tokens after 8 prompts of 1024, greedily, in bfloat16; the
share of the time in which the memory could give weights and cache. Times are medians; each
contender's first run, which compiles, is left out. Prints a JSON line per contender.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

# Torch's memory is beside ours, not in what JAX would take beforehand.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import decode_cost
import jax
import jax.numpy as jnp
import numpy as np
import optax

from redco_flow import Deployer, Trainer
from redco_flow.engine.callbacks import Callback
from redco_flow.engine.devices import known_device
from redco_flow.engine.progress import peak_memory_bytes
from redco_flow.engine.step.chunked_loss import chunked_cross_entropy
from redco_flow.engine.step.lora import plan_lora
from redco_flow.engine.training_plan import TrainingPlan
from redco_flow.models.attention.bias import row_biases
from redco_flow.models.attention.cudnn import cudnn_attend
from redco_flow.models.attention.triton import triton_attend
from redco_flow.models.find import find_model
from redco_flow.models.generation.generate import generate
from redco_flow.models.layer_config import AttentionConfig

HEADS, GROUPS = 32, 8
# LLaMA-3.2-1B, LLaMA-3-8B; tiny: to try this file.
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    "8b": decode_cost.SHAPES["8b"] | {"tie_word_embeddings": False},
    "tiny": {
        "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 256, "tie_word_embeddings": True,
    },
}  # fmt: skip
LLAMA = find_model("llama")


def say(**record: Any) -> None:
    print(json.dumps({"device": jax.devices()[0].device_kind, **record}), flush=True)


def seconds_of(run: Callable[[], Any], repeats: int = 10, rounds: int = 5) -> float:
    """The median over rounds of one call's time, when calls follow each other."""
    jax.block_until_ready(run())
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            last = run()
        jax.block_until_ready(last)
        found.append((time.perf_counter() - start) / repeats)
    return statistics.median(found)


def time_attention(options: argparse.Namespace) -> None:
    from jax.experimental.pallas.ops.gpu import attention as bare

    dim = options.head_dim
    config = AttentionConfig(HEADS, GROUPS, dim, dim**-0.5)
    for shape in options.shapes:
        rows, length = map(int, shape.split("x"))
        random = np.random.default_rng(0)
        heads = [
            jnp.asarray(random.standard_normal((rows, length, num, dim)), jnp.bfloat16)
            for num in (HEADS, GROUPS, GROUPS, HEADS)
        ]
        segments = jnp.broadcast_to(jnp.arange(length) // (length // 3 + 1), (rows, length))
        packed = row_biases(None, segments)

        def jax_triton(q: Any, k: Any, v: Any, ids: Any, dim: int = dim) -> Any:
            k, v = (jnp.repeat(x, HEADS // GROUPS, axis=2) for x in (k, v))
            return bare.mha(q, k, v, ids, dim**-0.5, causal=True)

        contenders: dict[str, Any] = {
            "triton": partial(triton_attend, config),
            "cudnn": partial(cudnn_attend, config),
            "jax_triton": partial(jax_triton, ids=None),
            "triton, packed": partial(triton_attend, config, biases=packed),
            "cudnn, packed by a bias": partial(cudnn_attend, config, biases=packed),
            "jax_triton, packed": partial(jax_triton, ids=segments),
        }
        flops = 4 * rows * HEADS * length**2 * dim / 2
        for name, attend in contenders.items():
            try:
                forward, both = _attention_seconds(attend, heads)
            except Exception as error:  # noqa: BLE001 (the other contenders go on)
                say(attention=name, shape=shape, error=str(error)[:300])
                continue
            rates = {}
            if "packed" not in name:  # of other documents nothing is seen
                rates = {
                    "forward_tflops": round(flops / forward / 1e12),
                    "both_tflops": round(3.5 * flops / both / 1e12),
                }
            say(
                attention=name, shape=shape, head_dim=dim, forward_ms=round(1e3 * forward, 3),
                both_ms=round(1e3 * both, 3), **rates,
            )  # fmt: skip


def _attention_seconds(attend: Any, heads: list[Any]) -> tuple[float, float]:
    forward = jax.jit(attend)

    @jax.jit
    def both(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        found, pull_back = jax.vjp(attend, q, k, v)
        return found, pull_back(cotangent)

    return seconds_of(lambda: forward(*heads[:3])), seconds_of(lambda: both(*heads))


class Speed(Callback):
    """The records of each logging."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_log(self, record: Any) -> None:
        self.records.append(dict(record))


def config_of(options: argparse.Namespace) -> Any:
    values = {"model_type": "llama", "max_position_embeddings": options.length}
    config = LLAMA.Config.from_hugging_face({**values, **SHAPES[options.shape]})
    return config.updated(
        {"dtype": "bfloat16", "remat": options.remat, "attention": options.attention}
    )


def draw_params(config: Any, dtype: str) -> Any:
    @jax.jit
    def draw(key: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), LLAMA.init_params(config, key))

    return draw(jax.random.key(0))


def abstract_params(config: Any, dtype: str) -> Any:
    return jax.eval_shape(lambda: draw_params(config, dtype))


def loss_of(config: Any) -> Any:
    """As the recipe `language_modeling`: the head's product in parts."""

    def loss_fn(params: Any, batch: Any, rngs: Any, is_training: bool) -> Any:
        hidden, head, _ = LLAMA.apply_before_head(
            config, params, batch["input_ids"], position_ids=batch.get("position_ids"),
            segment_ids=batch.get("segment_ids"),
        )  # fmt: skip
        score = partial(LLAMA.score, config)
        return chunked_cross_entropy(score, head, hidden, batch["labels"], num_chunks="auto")

    return loss_fn


def collate(is_packed: bool, examples: list[dict[str, Any]]) -> dict[str, Any]:
    ids = np.stack([example["ids"] for example in examples])
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    if is_packed:
        length = ids.shape[1] - 1
        segments = np.arange(length, dtype=np.int32) // (length // 3 + 1)
        places = np.arange(length, dtype=np.int32) % (length // 3 + 1)
        batch["segment_ids"] = np.broadcast_to(segments, batch["labels"].shape)
        batch["position_ids"] = np.broadcast_to(places, batch["labels"].shape)
    return batch


def make_examples(options: argparse.Namespace, num_steps: int) -> list[dict[str, Any]]:
    random, vocab = np.random.default_rng(0), SHAPES[options.shape]["vocab_size"]
    size = (num_steps * options.rows, options.length + 1)
    return [{"ids": row} for row in random.integers(3, vocab, size, dtype=np.int32)]


def time_training(options: argparse.Namespace) -> None:
    _train_ours(options, {"training": "ours"})
    if options.torch:
        for is_compiled in (False, True):
            _train_torch(options, is_compiled=is_compiled)


def time_factors(options: argparse.Namespace) -> None:
    """One base a process: the peak of its memory is that of all that it ran."""
    if options.base is None:
        for base in ("bfloat16", "int8", "nf4"):
            subprocess.run([sys.executable, *sys.argv, "--base", base], check=True)
    else:
        base_dtype = None if options.base == "bfloat16" else options.base
        config = config_of(options)
        ids = jax.ShapeDtypeStruct((2, options.length), jnp.int32)
        batch = {"input_ids": ids, "labels": ids}
        lora = plan_lora(
            abstract_params(config, "bfloat16"), loss_of(config), batch, None, False,
            rank=16, alpha=32.0, targets="layers", base_dtype=base_dtype,
        )  # fmt: skip
        # What is frozen is kept in bfloat16, as `frozen_dtype: bfloat16` does.
        _train_ours(options, {"factors_beside": options.base}, lora=lora)


def _train_ours(options: argparse.Namespace, name: dict[str, Any], **planned: Any) -> None:
    deployer, config = Deployer(), config_of(options)
    examples = make_examples(options, options.steps)
    made = partial(collate, options.packed)
    dtype = "bfloat16" if "lora" in planned else "float32"
    plan = TrainingPlan(
        deployer,
        loss_fn=loss_of(config),
        params=abstract_params(config, dtype),
        optimizer=optax.adamw(1e-5),
        global_batch_size=options.rows,
        max_grad_norm=1.0,
        batch=made(examples[:2]),
        **planned,
    )
    params = draw_params(config, dtype)
    start = time.perf_counter()
    planned_bytes = plan.memory().total
    trainer = Trainer.from_plan(plan, collate_fn=made, params=params)
    del params
    trainer.fit(examples, num_epochs=1, log_every_steps=options.steps)
    jax.block_until_ready(trainer.state["params"])
    first = time.perf_counter() - start
    speed, seconds = Speed(), []
    for epoch in range(2, 2 + options.rounds):
        start = time.perf_counter()
        trainer.fit(examples, num_epochs=epoch, log_every_steps=options.steps, callbacks=[speed])
        jax.block_until_ready(trainer.state["params"])
        seconds.append((time.perf_counter() - start) / options.steps)
    last = speed.records[-1]
    say(
        **name, shape=options.shape, remat=options.remat, packed=options.packed,
        attention=options.attention,
        step_seconds=round(statistics.median(seconds), 4),
        tokens_per_second=round(options.rows * options.length / statistics.median(seconds)),
        **{key: last.get(key) for key in ("loss", "tflops_per_device", "mfu")},
        first_seconds=round(first, 1),
        planned_gib=round(planned_bytes / 2**30, 1), peak_gib=_peak_gib(),
    )  # fmt: skip


def _peak_gib() -> float | None:
    peak = peak_memory_bytes(jax.devices())
    return None if peak is None else round(peak / 2**30, 1)


def _train_torch(options: argparse.Namespace, *, is_compiled: bool) -> None:
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    config = transformers.LlamaConfig(
        max_position_embeddings=options.length, **SHAPES[options.shape]
    )
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).train()
    called = torch.compile(model) if is_compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    examples = make_examples(options, 1)
    ids = torch.tensor(np.stack([example["ids"] for example in examples])[:, :-1]).long().to(device)

    def step() -> Any:
        with torch.autocast(device, torch.bfloat16):
            loss = called(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def run() -> float:
        start = time.perf_counter()
        for _ in range(options.steps):
            loss = step()
        loss.item()
        return (time.perf_counter() - start) / options.steps

    run()
    found = statistics.median(run() for _ in range(options.rounds))
    say(
        training="torch.compile" if is_compiled else "torch", shape=options.shape,
        step_seconds=round(found, 4), tokens_per_second=round(ids.numel() / found),
        peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1) if device == "cuda" else None,
    )  # fmt: skip


def time_decoding(options: argparse.Namespace) -> None:
    rows, prompt, new_tokens = 8, 1024, options.new_tokens
    options.length = prompt + new_tokens
    config, deployer = config_of(options), Deployer()

    params = draw_params(config, "bfloat16")
    ids = np.random.default_rng(0).integers(3, config.vocab_size, (rows, prompt), dtype=np.int32)
    given = jax.device_put((ids, np.ones_like(ids)))

    def decode(count: int) -> Callable[[], Any]:
        search = partial(generate, LLAMA, config, max_new_tokens=count)
        run = jax.jit(deployer.on_mesh(search))
        return lambda: run(params, *given)

    prefill = seconds_of(decode(1), repeats=1, rounds=3)
    whole = seconds_of(decode(new_tokens), repeats=1, rounds=3)
    leaves = jax.tree.leaves({k: v for k, v in params.items() if k != "embedding"})
    read = sum(leaf.nbytes for leaf in leaves)
    if config.tie_word_embeddings:
        read += sum(leaf.nbytes for leaf in jax.tree.leaves(params["embedding"]))
    core = config.core
    slot = 2 * 2 * core.num_layers * rows * core.attention.num_kv_heads * core.attention.head_dim
    moved = read + slot * (prompt + new_tokens / 2)
    token = (whole - prefill) / (new_tokens - 1)
    device = known_device(jax.devices()[0].device_kind)
    rate = None if device is None else device.hbm_gb_s * 1e9
    say(
        decoding="ours", shape=options.shape, prefill_ms=round(1e3 * prefill, 1),
        token_ms=round(1e3 * token, 3), tokens_per_second=round(rows / token),
        memory_share=round(moved / rate / token, 3) if rate else None,
    )  # fmt: skip
    if options.torch:
        del params
        _decode_torch(options, ids, new_tokens)


def _decode_torch(options: argparse.Namespace, ids: Any, new_tokens: int) -> None:
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_dtype(torch.bfloat16)
    config = transformers.LlamaConfig(max_position_embeddings=4096, **SHAPES[options.shape])
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).eval()
    given = torch.tensor(ids).long().to(device)

    @torch.no_grad()
    def seconds(count: int) -> float:
        found = []
        for _ in range(3):
            start = time.perf_counter()
            model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=count,
                min_new_tokens=count, do_sample=False, pad_token_id=0,
            )  # fmt: skip
            if device == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    seconds(2)
    prefill, whole = seconds(1), seconds(new_tokens)
    token = (whole - prefill) / (new_tokens - 1)
    say(
        decoding="torch", shape=options.shape, prefill_ms=round(1e3 * prefill, 1),
        token_ms=round(1e3 * token, 3), tokens_per_second=round(len(ids) / token),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = {
        "attention": time_attention, "train": time_training, "factors": time_factors,
        "decode": time_decoding,
    }  # fmt: skip
    parser.add_argument("what", choices=modes)
    parser.add_argument("--shapes", nargs="+", default=["8x2048", "2x8192"])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--torch", action="store_true", help="transformers' model beside it")
    parser.add_argument(
        "--base", choices=("bfloat16", "int8", "nf4"), help="of factors: this alone"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=256)
    options = parser.parse_args()
    modes[options.what](options)


if __name__ == "__main__":
    main()

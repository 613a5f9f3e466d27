"""Predict how long a step takes on GPUs, from the text of its compiled program.

The sum over kernels of each kernel's own roofline, which is the longer of computing its products
and of moving its bytes, and of what a launch costs; a loop's kernels as often as it turns. What
collectives send takes its time beside the kernels that are scheduled between start and done; only
the wait that is left counts. What is not known is refused, never guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from redco_flow.engine.devices import Device
from redco_flow.engine.step.links import (
    COLLECTIVES,
    Fabrics,
    Figures,
    Links,
    NotPredicted,
    kind_and_phase,
)
from redco_flow.engine.step.program import Computation, Instruction, Program, dims_of

_NOT_COUNTED = (
    "fft", "cholesky", "triangular-solve", "infeed", "outfeed", "send", "recv", "custom-call",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
# Custom calls that compute little and are bound by their bytes.
_MOVING_CALLS = ("cu_threefry2x32_ffi", "__cub$DeviceRadixSort")
_TRITON = "__gpu$xla.gpu.triton"
# Of `models.attention.triton_kernels`: how many products each computes of its queries, keys and
# head dim. The causal order shows half of the keys.
_ATTENTION = re.compile(r"\b(flash_[a-z_]+?)(_causal)?\)*/pallas_call")
_ATTENTION_PRODUCTS = {"flash_forward": 2, "flash_query_gradient": 3, "flash_key_gradients": 4}


Spent = dict[str, float]
"""Seconds by what they are spent on."""


@dataclass(frozen=True)
class Attained:
    """Shares of a data sheet's figures that kernels attain, and what a launch costs."""

    products: float
    attention: float
    memory: float
    links: float
    launch_seconds: float


# Usual shares, held against steps of LLaMA-3.2-1B and decoding measured on an H200 and an H100
# (docs/benchmarks.md). Attention: FlashAttention's kernels there, heads of 64 dims. Links: 240 of
# 300 GB/s, nccl-tests' bus bandwidth on 8 A100s; not measured with this project. `BEST` has the
# ceilings seen on that H100: a product of 8192³ at 0.80, a copy at 0.90. `WORST` is as far on the
# other side.
USUAL = Attained(0.7, 0.35, 0.8, 0.8, 1.5e-6)
BEST = Attained(0.8, 0.5, 0.9, 0.95, 1e-6)
WORST = Attained(0.6, 0.25, 0.7, 0.6, 3e-6)


@dataclass(frozen=True)
class StepTime:
    """The time of a step in seconds.

    Args:
        seconds: as expected.
        least, most: with what kernels attain at best and at worst.
        parts: of `seconds`: products, attention, other kernels, launches, and waits for
            communication.
        facts: the figures of the device that it was computed with, by their names in `Device`.
    """

    seconds: float
    least: float
    most: float
    parts: Spent
    facts: list[str]


def predict_step_time(
    program: Program, device: Device, hosts: Sequence[int], fabrics: Fabrics | None = None
) -> StepTime:
    """Predict the time of a program's run.

    Args:
        hosts: of each partition of the program, the number of its host.
        fabrics: which hosts share a network; None: all.

    Raises:
        NotPredicted: something in the program, or of the device, is not known.
    """
    if device.platform != "cuda":
        raise NotPredicted("no step on a TPU has been measured yet to compare with")
    figures = Figures(device)
    timers = [
        _Timer(program, links_of(figures, hosts, fabrics, attained), attained)
        for attained in (USUAL, BEST, WORST)
    ]
    try:
        usual, best, worst = (timer.seconds_of(program.entry) for timer in timers)
    except NotPredicted:
        raise
    except (LookupError, ValueError) as error:
        raise NotPredicted(f"the program's text is not as expected: {error!r}") from error
    seconds, least, most = (sum(spent.values()) for spent in (usual, best, worst))
    return StepTime(seconds, least, most, usual, list(figures.used))


def links_of(
    figures: Figures, hosts: Sequence[int], fabrics: Fabrics | None, attained: Attained = USUAL
) -> Links:
    """Return the links of devices, as fast as collectives make them."""
    return Links(figures, hosts, attained.links, fabrics, USUAL.links)


@dataclass(frozen=True)
class _Timer:
    program: Program
    links: Links
    attained: Attained

    def seconds_of(self, name: str) -> Spent:
        """Return the seconds of a computation's run."""
        computation = self.program.computations[name]
        spent: Spent = {}
        link_is_free, ends = 0.0, dict[str, float]()
        for one in computation.instructions.values():
            now = sum(spent.values())
            kind, phase = kind_and_phase(one.operation)
            if kind in COLLECTIVES and phase == "done":
                _add(spent, {"communication": max(0.0, ends.pop(one.operands[0]) - now)})
            elif kind in COLLECTIVES:
                sending = self.links.send(kind, computation, one)
                link_is_free = max(now, link_is_free) + sending.seconds
                if phase == "start":
                    ends[one.name] = link_is_free
                else:
                    _add(spent, {"communication": link_is_free - now})
            elif called := self.program.called(one):
                _add(spent, self._called(one, called))
            else:
                _add(spent, self._kernel(computation, one))
        return spent

    def _called(self, one: Instruction, called: list[tuple[str, int | None]]) -> Spent:
        """Return the seconds of a call, of a loop, or of a conditional's longest branch."""
        found: list[Spent] = []
        for name, times in called:
            if times is None:
                raise NotPredicted(f"the loop {one.name} does not say how often it turns")
            once = self.seconds_of(name) if times else {}
            found.append({part: seconds * times for part, seconds in once.items()})
        return max(found, key=lambda spent: sum(spent.values()))

    def _kernel(self, computation: Computation, one: Instruction) -> Spent:
        num_bytes = self.program.bytes_moved(computation, one)
        if not num_bytes:
            return {}
        self._refuse(computation, one)
        part, share = "other kernels", self.attained.products
        if one.target == _TRITON:
            part, share = "attention", self.attained.attention
            products = _attention(computation, one)
        elif products := self.program.products(computation, one):
            part = "products"
        what = f"the memory of {self.links.figures.device.kind}"
        hbm_gb_s = self.links.figures.attained("hbm_gb_s", self.attained.memory, USUAL.memory, what)
        moving = num_bytes / (hbm_gb_s * 1e9)
        computing = sum(
            flops / (self._tflops(dtype, share) * 1e12) for dtype, flops in products.items()
        )
        return {part: max(moving, computing), "launches": self.attained.launch_seconds}

    def _refuse(self, computation: Computation, one: Instruction) -> None:
        """Raise NotPredicted of what is neither bytes nor products."""
        for _, each in self.program.within(computation, one):
            is_known = each.target in (_TRITON, *_MOVING_CALLS) or each.is_product
            kind, _ = kind_and_phase(each.operation)
            if kind in _NOT_COUNTED and not is_known:
                what = f"custom call {each.target}" if each.target else each.operation
                raise NotPredicted(f"the {what} is not known")
            if kind in COLLECTIVES:
                raise NotPredicted(f"the {each.operation} in {one.name} is part of a kernel")
        if "S(5)" in one.result:
            raise NotPredicted("the speed of copies to the host's memory is not known")

    def _tflops(self, dtype: str, share: float) -> float:
        fact = {
            "bf16": "bfloat16_tflops", "f16": "bfloat16_tflops",
            "f32": "tf32_tflops", "f32 highest": "float32_tflops",
        }.get(dtype, "")  # fmt: skip
        what = f"products of {dtype} on {self.links.figures.device.kind}"
        return self.links.figures.attained(fact, share, USUAL.products, what)


def _add(spent: Spent, more: Spent) -> None:
    for part, seconds in more.items():
        spent[part] = spent.get(part, 0.0) + seconds


def _attention(computation: Computation, one: Instruction) -> dict[str, int]:
    """Return the operations of attention's kernels by dtype; packed rows and windows count whole.

    Dims: queries (…, Q, H, K), keys (…, M, G, K), with the head dim K.
    """
    name = _ATTENTION.search(one.text)
    if name is None or name[1] not in _ATTENTION_PRODUCTS:
        raise NotPredicted("a kernel of Triton is not known")
    queries, keys = (computation.instructions[each].result for each in one.operands[:2])
    one_product = 2 * math.prod(dims_of(queries)) * dims_of(keys)[-3]
    flops = _ATTENTION_PRODUCTS[name[1]] * one_product
    return {queries.partition("[")[0]: flops // 2 if name[2] else flops}

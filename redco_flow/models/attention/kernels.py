"""Choose what computes attention: XLA, TPUs' splash attention, cuDNN's or Triton's flash attention.

The platform is that of the mesh that is being traced for, so that a step compiled for devices that
are not there has the kernel that would run on them. Without a mesh it is XLA: that is also how the
sharding rules see attention.
Dims in this file: B batch, Q queries, M keys, H heads, G key-value groups, K head dim.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp

from redco_flow.models.attention.bias import Biases, SameDocument, VisibleKeys
from redco_flow.models.attention.context import mapped_axes, num_context_shards
from redco_flow.models.attention.cudnn import needs_bias
from redco_flow.models.attention.grouped import Window
from redco_flow.models.layer_config import AttentionConfig
from redco_flow.models.projections import num_model_shards

Kernel = Literal["xla", "splash", "cudnn", "triton"]

_CUDNN_MAX_HEAD_DIM = 128
# Wider heads' blocks do not fit into a GPU's shared memory.
_TRITON_MAX_HEAD_DIM = 256
_MIN_COMPUTE_CAPABILITY = 8.0
# Splash attention's blocks are no smaller.
_SPLASH_MIN_LENGTH = 128

_WHOLE_BIAS = "cuDNN would need a bias as large as the scores for the rows' masks"

logger = logging.getLogger(__name__)


class Asked(NamedTuple):
    """The requirements of one attention for a kernel; see `choose_kernel`."""

    config: AttentionConfig
    query: jax.Array
    key: jax.Array
    biases: Biases
    window: Window
    windows: tuple[int, ...]
    drops: bool


def choose_kernel(
    asked: str,
    config: AttentionConfig,
    query: jax.Array,
    key: jax.Array,
    biases: Biases,
    *,
    window: Window,
    windows: tuple[int, ...],
    drops: bool,
) -> Kernel:
    """Return what computes an attention; the log says it once, with the reason where it is second.

    Args:
        asked: one of `config.ATTENTION_KERNELS`. Where the mesh's devices have that kernel and it
            cannot compute this attention, XLA does. `auto` on GPUs: cuDNN without a bias as large
            as the scores, else Triton, else cuDNN with such a bias, else XLA.
        drops: whether weights are dropped out.
        query, key, biases, window, windows: see `attend_sequence`.

    Raises:
        ValueError: the mesh's devices do not have the kernel that is asked for.
    """
    device = mesh_device()
    if device is None:
        return "xla"
    kernels = _device_kernels(device)
    if asked not in ("auto", "xla") and kernels.get(asked, "no such kernel") is not None:
        raise ValueError(
            f"attention is {asked!r}, which {device.device_kind} devices cannot compute: splash "
            "runs on TPUs, triton on NVIDIA GPUs and cudnn on this machine's, both of compute "
            f"capability {_MIN_COMPUTE_CAPABILITY} or above where sequences are not split. Take "
            "auto or xla."
        )
    attention = Asked(config, query, key, biases, window, windows, drops)
    obstacles = {
        kernel: missing or _sinks_obstacle(config) or _OBSTACLES[kernel](attention)
        for kernel, missing in kernels.items()
        if asked in ("auto", kernel)
    }
    prefers_no_bias = asked == "auto" and _is_told_by_bias(attention)
    chosen, reason = first_able(obstacles, prefers_no_bias=prefers_no_bias)
    if asked == "xla" and kernels:
        reason = "the setting says so"
    _log_choice(chosen, device.device_kind, reason)
    return chosen


def mesh_device() -> Any:
    """Return kind and platform of the devices that are being traced for; None without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh.abstract_device


def first_able(
    obstacles: dict[str, str | None], *, prefers_no_bias: bool
) -> tuple[Kernel, str | None]:
    """Return the first kernel without an obstacle, and the obstacles of those before it.

    Args:
        obstacles: of each kernel that may be taken, the best first; None: it can compute this.
        prefers_no_bias: whether cuDNN would need a bias as large as the scores, and is taken
            after all other kernels.
    """
    is_second = prefers_no_bias and obstacles.get("cudnn", "") is None
    if is_second:
        obstacles = obstacles | {"cudnn": _WHOLE_BIAS}
    reasons: dict[str, None] = {}
    for kernel, obstacle in obstacles.items():
        if obstacle is None:
            return cast("Kernel", kernel), "; ".join(reasons) or None
        reasons[obstacle] = None
    return "cudnn" if is_second else "xla", "; ".join(reasons) or None


@functools.cache
def _log_choice(kernel: Kernel, device_kind: str, reason: str | None) -> None:
    """Log a choice, the first time that it is made."""
    if reason is not None:
        logger.info("attention on %s devices: %s, because %s.", device_kind, kernel, reason)
    elif kernel != "xla":
        logger.info("attention on %s devices: %s.", device_kind, kernel)


def _device_kernels(device: Any) -> dict[str, str | None]:
    """Return the kernels of a platform, the best first, and why these devices lack one."""
    if device.platform == "tpu":
        return {"splash": None}
    if device.platform not in ("gpu", "cuda"):
        return {}
    if num_context_shards() > 1:
        return dict.fromkeys(("cudnn", "triton"), "over context shards attention goes by a ring")
    own = [own for own in jax.local_devices() if own.device_kind == device.device_kind]
    if not own:
        is_nvidia = device.device_kind.startswith("NVIDIA")
        return {
            "cudnn": "cuDNN's kernels are compiled beside the NVIDIA GPUs that run them alone",
            "triton": None if is_nvidia else "Triton's kernel is for NVIDIA GPUs",
        }
    if "cuda" not in own[0].client.platform_version.lower():
        return dict.fromkeys(("cudnn", "triton"), "the kernels are for NVIDIA GPUs")
    if float(own[0].compute_capability) < _MIN_COMPUTE_CAPABILITY:
        missing = f"the kernels need compute capability {_MIN_COMPUTE_CAPABILITY}"
        return dict.fromkeys(("cudnn", "triton"), missing)
    return {"cudnn": None, "triton": None}


def _sinks_obstacle(config: AttentionConfig) -> str | None:
    return "heads have attention sinks, which no kernel supports" if config.has_sinks else None


def _splash_obstacle(asked: Asked) -> str | None:
    if asked.drops:
        return "attention weights are dropped out"
    if not _are_segment_ids(asked.biases):
        return "scores have a bias, as of relative positions"
    if isinstance(asked.window, jax.Array) and not asked.windows:
        return "the window is not known before it runs"
    if min(_lengths(asked)) < _SPLASH_MIN_LENGTH * num_context_shards():
        return f"sequences on a device are shorter than {_SPLASH_MIN_LENGTH} tokens"
    return _heads_obstacle(asked)


def cudnn_obstacle(asked: Asked) -> str | None:
    """Return why an attention cannot be trained by cuDNN; None: it can."""
    config = asked.config
    if asked.drops:
        return "attention weights are dropped out"
    if config.cap is not None:
        return "cuDNN has no soft cap"
    if asked.query.dtype != jnp.bfloat16:
        return f"cuDNN does not compute in {asked.query.dtype.name}"
    if config.head_dim > _CUDNN_MAX_HEAD_DIM or config.head_dim % 8:
        return (
            f"heads have {config.head_dim} dims; cuDNN takes {_CUDNN_MAX_HEAD_DIM} or fewer, by 8"
        )
    if any(isinstance(bias, jax.Array) and bias.shape[1] > 1 for bias in asked.biases):
        return "scores have a bias of each head, as of relative positions"
    if asked.window is not None and not config.is_causal:
        return "a window without a causal mask also shows what comes"
    if any(length % 2 for length in _lengths(asked)):
        return "lengths are odd, and JAX trains by cuDNN only where they are even"
    return None


def _triton_obstacle(asked: Asked) -> str | None:
    if asked.drops:
        return "attention weights are dropped out"
    if asked.config.head_dim > _TRITON_MAX_HEAD_DIM:
        return (
            f"heads have {asked.config.head_dim} dims; Triton's kernel takes "
            f"{_TRITON_MAX_HEAD_DIM} or fewer"
        )
    if not _are_segment_ids(asked.biases):
        return "scores have a bias, as of relative positions"
    return _heads_obstacle(asked)


_OBSTACLES: dict[str, Callable[[Asked], str | None]] = {
    "splash": _splash_obstacle,
    "cudnn": cudnn_obstacle,
    "triton": _triton_obstacle,
}


def _heads_obstacle(asked: Asked) -> str | None:
    """Return why heads cannot be split over model shards by hand."""
    num_heads, num_groups = asked.query.shape[2], asked.key.shape[2]
    num_shards = 1 if "model" in mapped_axes() else num_model_shards()
    if num_heads % num_shards or num_groups % num_shards:
        return (
            f"{num_shards} model shards do not divide {num_heads} heads and "
            f"{num_groups} key-value heads"
        )
    return None


def _are_segment_ids(biases: Biases) -> bool:
    return all(isinstance(bias, VisibleKeys | SameDocument) for bias in biases)


def _is_told_by_bias(asked: Asked) -> bool:
    """Say whether cuDNN would need a bias (B, 1, Q, M)."""
    return needs_bias(
        asked.config, asked.query, asked.key, asked.biases, asked.window, asked.windows
    )


def _lengths(asked: Asked) -> tuple[int, int]:
    return asked.query.shape[1], asked.key.shape[1]

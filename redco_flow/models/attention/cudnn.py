"""cuDNN's flash attention on NVIDIA GPUs, as JAX's own attention asks for it.

JAX passes it no segment ids, and a bias is as large as the scores. So padding is passed as a
number of keys: hidden keys are moved behind the visible ones, whose order stays. A window is an
argument. Only masks that these cannot express are a bias (B, 1, Q, M): `needs_bias`.
Dims in this file: B batch, Q queries, M keys, H heads, G key-value groups, K head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from redco_flow.models.attention.bias import Biases, VisibleKeys, as_arrays, band_bias
from redco_flow.models.attention.grouped import Window
from redco_flow.models.attention.kernel_calls import with_named_residuals
from redco_flow.models.layer_config import AttentionConfig

# As jax.nn.dot_product_attention.
Attention = Callable[..., jax.Array]

_CUDNN: Attention = partial(jax.nn.dot_product_attention, implementation="cudnn")


def cudnn_attend(
    config: AttentionConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: Biases = (),
    *,
    window: Window = None,
    windows: tuple[int, ...] = (),
    attention: Attention = _CUDNN,
) -> jax.Array:
    """Attend with queries (B, Q, H, K) over keys and values (B, M, G, K): (B, Q, H, K).

    Results are those of `attend_grouped`, without cap and dropout, but for queries that may see no
    key at all, and for hidden ones of causal attention with visible ones behind them (padding on
    the left): those are 0 where biases are `VisibleKeys` alone, else finite.

    Args:
        window: how many tokens back, itself included, a query looks; None: all. Causal only.
        windows: the values that `window` may have, where it is an array.
        attention: what computes it.
    """
    attend = partial(_attend, config, attention)
    if isinstance(window, jax.Array) and windows:
        number = jnp.argmax(jnp.asarray(windows) == window)
        branches = [partial(attend, choice) for choice in windows]
        attended: jax.Array = jax.lax.switch(number, branches, query, key, value, biases)
        return attended
    return attend(window, query, key, value, biases)


def needs_bias(
    config: AttentionConfig,
    query: jax.Array,
    key: jax.Array,
    biases: Biases,
    window: Window,
    windows: tuple[int, ...] = (),
) -> bool:
    """Return whether the mask has to be passed as a bias (B, 1, Q, M).

    Documents of packed rows need one; so does padding where causal queries look a window back, for
    hidden keys among visible ones count there; and so does a window that is known only at run time.
    """
    if isinstance(window, jax.Array) and not windows:
        return True
    looks = windows if isinstance(window, jax.Array) else (window,)
    is_windowed = any(look is not None and look < key.shape[1] for look in looks)
    if not all(isinstance(bias, VisibleKeys) for bias in biases) or len(biases) > 1:
        return True
    is_told = not config.is_causal or (query.shape[1] == key.shape[1] and not is_windowed)
    return bool(biases) and not is_told


def _attend(
    config: AttentionConfig,
    attention: Attention,
    window: Window,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: Biases,
) -> jax.Array:
    if isinstance(window, int) and window >= key.shape[1]:
        window = None
    arrays: dict[str, jax.Array] = {}
    if needs_bias(config, query, key, biases, window):
        arrays["bias"], window = _whole_bias(query, key, biases, window)
    ask = partial(attention, scale=config.scale, is_causal=config.is_causal)
    if window is not None:
        ask = partial(ask, local_window_size=(window - 1, 0))
    named = _with_named_residuals(ask)
    if not biases or arrays:
        return named(query, key, value, **arrays)
    (hiding,) = biases
    assert isinstance(hiding, VisibleKeys)
    is_visible = jnp.asarray(hiding.is_visible) != 0
    return _attend_visible(named, query, key, value, is_visible, is_causal=config.is_causal)


def _with_named_residuals(attention: Attention) -> Attention:
    """Return it with what its backward pass keeps named; what is given by name are arrays."""

    def call(query: jax.Array, key: jax.Array, value: jax.Array, arrays: Any) -> jax.Array:
        return attention(query, key, value, **arrays)

    named = with_named_residuals(call)
    return lambda query, key, value, **arrays: named(query, key, value, arrays)


def _whole_bias(
    query: jax.Array, key: jax.Array, biases: Biases, window: Window
) -> tuple[jax.Array, int | None]:
    """Return the bias (B, 1, Q, M), and the window that it does not hold."""
    added = as_arrays(biases)
    if isinstance(window, jax.Array):
        band = band_bias(query.shape[1], key.shape[1], is_causal=False, window=window)
        assert band is not None
        added, window = (band, *added), None
    shape = (query.shape[0], 1, query.shape[1], key.shape[1])
    return jnp.broadcast_to(sum(added[1:], start=added[0]), shape).astype(query.dtype), window


def _attend_visible(
    ask: Attention,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    is_visible: jax.Array,
    *,
    is_causal: bool,
) -> jax.Array:
    """Attend to each row's visible keys (B, M): they are moved to the front and counted."""
    num_keys = is_visible.shape[1]
    num_visible = jnp.sum(is_visible, axis=1, dtype=jnp.int32)
    # Of a row that shows nothing, all: what it attends to does not count, but must be finite.
    lengths = jnp.where(num_visible > 0, num_visible, num_keys)
    order = jnp.argsort(~is_visible, axis=1, stable=True)
    key, value = _in_order(key, order), _in_order(value, order)
    if not is_causal:
        return ask(query, key, value, key_value_seq_lengths=lengths)
    # Queries move with their keys, so that a visible one sees those before it.
    heads = ask(_in_order(query, order), key, value, key_value_seq_lengths=lengths)
    heads = _in_order(heads, jnp.argsort(order, axis=1))
    # Hidden queries were behind all visible keys; of those that belong there it is right.
    is_behind = jnp.cumsum(is_visible[:, ::-1], axis=1)[:, ::-1] == 0
    return jnp.where((is_visible | is_behind)[..., None, None], heads, 0)


def _in_order(rows: jax.Array, order: jax.Array) -> jax.Array:
    """Return (B, T, …) with each row's T in its order (B, T)."""
    return jnp.take_along_axis(rows, order[..., None, None], axis=1)

"""Attention over whole sequences, wherever they lie: on one device, or split over several.

Dims in this file: B batch, Q queries, M keys, H heads, G key-value groups, K head dim.
"""

from __future__ import annotations

import jax

from redco_flow.models.block_config import AttentionConfig
from redco_flow.models.blockwise_bias import Biases, as_arrays
from redco_flow.models.context_axis import num_context_shards
from redco_flow.models.grouped_attention import Window, attend_grouped
from redco_flow.models.ring_attention import ring_attend


def attend_sequence(
    config: AttentionConfig,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: Biases = (),
    *,
    window: Window = None,
    dropout_keys: jax.Array | None = None,
    dropout_site: int = 0,
    is_balanced: bool = False,
) -> jax.Array:
    """Attend with queries (B, Q, H, K) over keys and values (B, M, G, K): (B, Q, H, K).

    See `attend_grouped` and `ring_attend` for the arguments; over several context shards biases
    are told by blocks, as `row_biases` does there.

    Raises:
        ValueError: a bias is whole where sequences are split.
    """
    if num_context_shards() == 1:
        return attend_grouped(
            config,
            query,
            key,
            value,
            as_arrays(biases),
            window=window,
            dropout_keys=dropout_keys,
            dropout_site=dropout_site,
        )
    return ring_attend(
        config,
        query,
        key,
        value,
        biases,
        window=window,
        dropout_keys=dropout_keys,
        dropout_site=dropout_site,
        is_balanced=is_balanced,
    )

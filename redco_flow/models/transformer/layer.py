"""One scanned layer of a transformer: over whole sequences, or one token with a cache.

Knows the places of norms and residuals and which products are computed together; its config says
whether it attends to later tokens and to another sequence.
Dims in this file: B batch, T sequence, N beams, D model, H heads, G key-value groups, K head
dim, E experts; S source or prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax

from redco_flow.engine.random import dropout, fold_keys
from redco_flow.models.attention.bias import Bias
from redco_flow.models.attention.cache import (
    BlockedHeads,
    KeysValues,
    StepLayer,
    StepShared,
    WholeShared,
    append,
    attend_cached,
)
from redco_flow.models.attention.context import split_sequence
from redco_flow.models.attention.latent import LatentAttention
from redco_flow.models.attention.ring import attend_sequence
from redco_flow.models.attention.rotary import Rotation, choose_rotation
from redco_flow.models.config import StackConfig
from redco_flow.models.feed_forward.experts import MixtureOfExperts
from redco_flow.models.feed_forward.mlp_chunks import feed_forward_in_chunks
from redco_flow.models.layer_config import MlpConfig
from redco_flow.models.numerics import attention_mask_bias
from redco_flow.models.projections import SplitKernel, in_mesh, merge_together, project_together
from redco_flow.models.transformer.blocks import Attention, Heads, Mlp, Norm
from redco_flow.models.transformer.saved_activations import layer_choices, save_policy, saved

# Queries, keys and values of the tokens at hand to what their heads gather, (B, T, H, K).
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# The same over another sequence, for queries.
AttendSource = Callable[[jax.Array], jax.Array]

# Which dropout this is among those that share a layer's keys.
_WEIGHTS, _ATTENTION_OUT, _MLP_INNER, _MLP_OUT, _CROSS_WEIGHTS, _CROSS_OUT = range(6)


class Layer(nn.Module):
    """Attention, over another sequence too, and feed-forward; or both side by side."""

    config: StackConfig

    def setup(self) -> None:
        """Declare the parts."""
        c = self.config
        from_heads = c.attention.num_heads * c.attention.value_dim
        into, out_of_heads, out_of_units = (
            c.stddev(c.width),
            c.stddev(from_heads) * c.residual_init,
            c.stddev(c.mlp.mlp_dim) * c.residual_init,
        )
        self.attention_norm = Norm(c.norm, c.width)
        kind: Any = Attention if c.attention.latent is None else LatentAttention
        self.attention = kind(c.attention, c.width, into, out_of_heads)
        if c.cross_attention is not None:
            self.cross_attention_norm = Norm(c.norm, c.width)
            self.cross_attention = Attention(c.cross_attention, c.width, into, out_of_heads)
        if not c.is_parallel:
            self.mlp_norm = Norm(c.norm, c.width)
        if c.norm_placement == "both":
            self.attention_post_norm = Norm(c.norm, c.width)
            self.mlp_post_norm = Norm(c.norm, c.width)
        if isinstance(c.mlp, MlpConfig):
            self.mlp = Mlp(c.mlp, c.width, into, out_of_units)
        else:
            self.experts = MixtureOfExperts(c.mlp, c.width, into, out_of_units)
            if (shared := c.mlp.shared) is not None:
                out_of_shared = c.stddev(shared.mlp_dim) * c.residual_init
                self.shared_experts = Mlp(shared, c.width, into, out_of_shared)

    def __call__(
        self, hidden: jax.Array, per_layer: tuple[Any, ...], shared: WholeShared
    ) -> tuple[jax.Array, jax.Array | None]:
        """Map (B, T, D) to (B, T, D), and to a mixture's router logits (B, T, E)."""
        hidden, router_logits, _ = self._whole(hidden, per_layer, shared)
        return hidden, router_logits

    def prefill(
        self, hidden: jax.Array, per_layer: tuple[Any, ...], shared: WholeShared
    ) -> tuple[jax.Array, KeysValues]:
        """Map (B, T, D) to (B, T, D), and to the tokens' keys and values (B, T, G, K)."""
        hidden, _, keys_values = self._whole(hidden, per_layer, shared)
        return hidden, keys_values

    def source_heads(self, encoded: jax.Array) -> KeysValues:
        """Return another sequence's keys and values (B, S, G, K)."""
        kernels = self.cross_attention.kernels()[1:]
        (projected,) = self._projected("qkv", encoded, kernels)
        return self.cross_attention.keys_values(projected)

    def step(
        self,
        hidden: jax.Array,
        cache: BlockedHeads,
        number: jax.Array | None,
        own: StepLayer,
        shared: StepShared,
    ) -> tuple[jax.Array, BlockedHeads]:
        """Map one token of each beam, (B, N, D), and add its key and value to the cache.

        Beams are in the dim of positions: to cross-attention, norms and feed-forward
        they are the same.

        Args:
            cache: (B, G, M, K) each; several layers' where `number` says which this one is.
        """
        biases = (*shared.biases, self._visible_bias(own.window, shared))

        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            nonlocal cache
            cache, kept = append(cache, (key, value), number, shared.slot)
            sinks = self.attention.head_sinks()
            return attend_cached(self.config.attention, query, kept, biases, sinks)

        def attend_source(query: jax.Array) -> jax.Array:
            assert self.config.cross_attention is not None
            assert own.source is not None
            assert shared.encoded_bias is not None
            return attend_cached(
                self.config.cross_attention, query, own.source, (shared.encoded_bias,)
            )

        source = None if own.source is None else attend_source
        rotation = choose_rotation(shared.rotations, own.rotary)
        hidden, _ = self._sublayers(hidden, rotation, attend, source, None)
        return hidden, cache

    def _visible_bias(self, window: jax.Array | None, shared: StepShared) -> jax.Array:
        """Return (B, 1, N, M) that hides what a beam may not see and what lies too far back."""
        reach = self.config.common_window if window is None else window
        is_visible = shared.is_visible
        if reach is not None:
            assert shared.back is not None
            is_visible = is_visible & (shared.back < reach)[:, None]
        return attention_mask_bias(is_visible)[:, None]

    def _whole(
        self, hidden: jax.Array, per_layer: tuple[Any, ...], shared: WholeShared
    ) -> tuple[jax.Array, jax.Array | None, KeysValues]:
        c = self.config
        layer, window, rotary = per_layer
        rotation = choose_rotation(shared.rotations, rotary)
        window = c.common_window if window is None else window
        keys = fold_keys(shared.keys, layer)
        seen: list[KeysValues] = []

        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            seen.append((key, value))
            return attend_sequence(
                c.attention,
                query,
                key,
                value,
                shared.biases,
                window=window,
                dropout_keys=keys,
                dropout_site=_WEIGHTS,
                is_balanced=shared.order.is_balanced,
                kernel=c.attention_kernel,
                windows=c.window_choices,
                offload_share=c.activations.share_offloaded("attention"),
                sinks=self.attention.head_sinks(),
            )

        source = None
        if shared.encoded is not None:
            source = self._attention_to(shared.encoded, shared.encoded_bias, keys)
        hidden = self._saved("layer_input", split_sequence(hidden))
        num_chunks = c.num_mlp_chunks if in_mesh() else 1
        hidden, router_logits = self._sublayers(hidden, rotation, attend, source, keys, num_chunks)
        return split_sequence(hidden), router_logits, seen[0]

    def _sublayers(
        self,
        hidden: jax.Array,
        rotation: Rotation | None,
        attend: Attend,
        attend_source: AttendSource | None,
        keys: jax.Array | None,
        num_mlp_chunks: int = 1,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Run attention and feed-forward with their norms and residuals."""
        c = self.config
        if c.is_parallel:
            return self._side_by_side(hidden, rotation, attend, keys, num_mlp_chunks), None

        heads = attend(*self._heads(self._normed("attention", hidden), rotation))
        if c.attention.latent is not None:
            heads = heads[..., : c.attention.value_dim]
        added = self._merged("attention_out", heads, self.attention)
        added = dropout(added, c.residual_dropout, keys, _ATTENTION_OUT)
        hidden = self._add("attention", hidden, added)

        if attend_source is not None:
            added = self._cross(self._normed("cross_attention", hidden), attend_source)
            added = dropout(added, c.residual_dropout, keys, _CROSS_OUT)
            hidden = self._add("cross_attention", hidden, added)

        hidden = self._saved("mlp_input", hidden)
        normed = self._normed("mlp", hidden)
        added, router_logits = self._feed_forward(normed, keys, num_mlp_chunks)
        added = dropout(added, c.residual_dropout, keys, _MLP_OUT)
        return self._add("mlp", hidden, added), router_logits

    def _heads(self, normed: jax.Array, rotation: Rotation | None) -> Heads:
        """Return queries (B, T, H, K), keys and values (B, T, G, K)."""
        attention, rotary = self.attention, self.config.rotary
        if isinstance(attention, LatentAttention):
            made: Heads = attention.heads(normed, partial(self._projected, "qkv"), rotary, rotation)
            return made
        projected = self._projected("qkv", normed, attention.kernels())
        found: Heads = attention.heads(projected, rotary, rotation)
        return found

    def _attention_to(
        self, encoded: jax.Array, bias: Bias | None, keys: jax.Array | None
    ) -> AttendSource:
        """Return cross-attention over (B, S, D), of which the bias hides padding."""
        config = self.config.cross_attention
        assert config is not None
        assert bias is not None
        key, value = self.source_heads(encoded)

        def attend_source(query: jax.Array) -> jax.Array:
            return attend_sequence(
                config,
                query,
                key,
                value,
                (bias,),
                dropout_keys=keys,
                dropout_site=_CROSS_WEIGHTS,
                kernel=self.config.attention_kernel,
                offload_share=self.config.activations.share_offloaded("attention"),
            )

        return attend_source

    def _cross(self, normed: jax.Array, attend_source: AttendSource) -> jax.Array:
        attention = self.cross_attention
        (projected,) = self._projected("qkv", normed, attention.kernels()[:1])
        heads = attend_source(attention.queries(projected))
        return self._merged("attention_out", heads, attention)

    def _feed_forward(
        self, normed: jax.Array, keys: jax.Array | None, num_chunks: int
    ) -> tuple[jax.Array, jax.Array | None]:
        if not isinstance(self.config.mlp, MlpConfig):
            outer, router_logits = self.experts(normed)
            if self.config.mlp.shared is not None:
                outer = outer + self._dense(self.shared_experts, normed, keys)
            return outer, router_logits
        if num_chunks > 1:
            return self._in_chunks(normed, keys, num_chunks), None
        return self._dense(self.mlp, normed, keys), None

    def _dense(self, mlp: Mlp, normed: jax.Array, keys: jax.Array | None) -> jax.Array:
        (projected,) = self._projected("mlp_in", normed, mlp.kernels())
        return self._merged("mlp_out", mlp.inner(projected, keys, _MLP_INNER), mlp)

    def _in_chunks(self, normed: jax.Array, keys: jax.Array | None, num_chunks: int) -> jax.Array:
        """Return what the feed-forward makes of some tokens of each device at a time."""
        made = feed_forward_in_chunks(self.mlp, num_chunks, normed, keys, _MLP_INNER)
        return _biased(self._saved("mlp_out", made), self.mlp.output_bias())

    def _merged(
        self, name: str, inner: jax.Array, block: Attention | LatentAttention | Mlp
    ) -> jax.Array:
        """Return a block's output projection of what it computed, with the bias."""
        kernel = block.wo if isinstance(block, Mlp) else block.out
        product = self._saved(name, merge_together([(inner, kernel)]))
        return _biased(product, block.output_bias())

    def _projected(
        self, name: str, x: jax.Array, kernels: Sequence[SplitKernel]
    ) -> list[jax.Array]:
        """Return the products with kernels, named for the backward pass to find."""
        return [self._saved(name, product) for product in project_together(x, kernels)]

    def _saved(self, name: str, x: jax.Array) -> jax.Array:
        """Name a result for the backward pass to find."""
        c = self.config
        return saved(x, name, layer_choices(c), c.activations.share_offloaded(name))

    def _side_by_side(
        self,
        hidden: jax.Array,
        rotation: Rotation | None,
        attend: Attend,
        keys: jax.Array | None,
        num_mlp_chunks: int,
    ) -> jax.Array:
        """Both read the same normed input; dropout falls on the sum of what they add."""
        c, attention, mlp = self.config, self.attention, self.mlp
        kernels = attention.kernels()
        if num_mlp_chunks > 1:
            normed = self.attention_norm(hidden)
            qkv = self._projected("qkv", normed, kernels)
            heads = attend(*attention.heads(qkv, c.rotary, rotation))
            added = self._merged("attention_out", heads, attention)
            added = added + self._in_chunks(normed, keys, num_mlp_chunks)
            return hidden + dropout(added, c.residual_dropout, keys, _MLP_OUT)
        *qkv, mlp_in = project_together(self.attention_norm(hidden), [*kernels, *mlp.kernels()])
        qkv = [self._saved("qkv", x) for x in qkv]
        heads = attend(*attention.heads(qkv, c.rotary, rotation))
        inner = mlp.inner(self._saved("mlp_in", mlp_in), keys, _MLP_INNER)
        # One product over several shards: linear, so neither part is ever looked at again.
        added = merge_together([(heads, attention.out), (inner, mlp.wo)])
        added = _biased(_biased(added, attention.output_bias()), mlp.output_bias())
        return hidden + dropout(added, c.residual_dropout, keys, _MLP_OUT)

    def _normed(self, sublayer: str, hidden: jax.Array) -> jax.Array:
        """Return what a sublayer reads."""
        if self.config.norm_placement in ("result", "post"):
            return hidden
        normed: jax.Array = getattr(self, f"{sublayer}_norm")(hidden)
        return normed

    def _add(self, sublayer: str, hidden: jax.Array, added: jax.Array) -> jax.Array:
        """Add what a sublayer gave to its input, with the norm on the result or on the sum."""
        placement = self.config.norm_placement
        if placement in ("result", "both"):
            norm = f"{sublayer}_norm" if placement == "result" else f"{sublayer}_post_norm"
            added = getattr(self, norm)(added)
        total = hidden + added
        return getattr(self, f"{sublayer}_norm")(total) if placement == "post" else total


def scanned_layers(config: StackConfig, *, is_initializing: bool) -> Any:
    """Return all layers as one module, scanned over their parameters and recomputed by policy.

    Args:
        is_initializing: whether parameters are drawn. Flax then traces a layer once more, to check
            what is broadcast; which numbers are drawn depends on it, and nothing else does.
    """
    layer: Any = Layer
    if config.remat not in ("none", "auto"):
        layer = nn.remat(layer, prevent_cse=False, policy=save_policy(layer_choices(config)))
    scanned: Any = nn.scan(
        layer,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast),
        length=config.num_layers,
        check_constancy_invariants=is_initializing,
    )
    return scanned(config)


def _biased(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias.astype(x.dtype)

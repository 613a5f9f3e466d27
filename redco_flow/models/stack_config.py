"""What a stack of equal transformer layers computes, in an encoder as in a decoder.

Frozen and hashable. Imports nothing heavy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from redco_flow.models.block_config import (
    AttentionConfig,
    MixtureConfig,
    MlpConfig,
    NormConfig,
    RelativeConfig,
    RotaryConfig,
)


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Shape and constants of the layers and of the positions they are told.

    Attributes:
        cross_attention: of each layer over another, encoded sequence; None: there is none.
        norm_placement: `pre` before each sublayer, `post` on the sum after it, `both` before it
            and on its result.
        is_parallel: attention and feed-forward read the same normed input; their results are
            added together.
        num_positions: rows of a learned table of positions; 0: there is none.
        position_offset: the row of position 0.
        relative: biases of the scores by distance; None: there are none.
        has_embedding_norm: whether what the first layer reads is normalised.
        has_final_norm: whether what the last layer gives is.
        windows: how many tokens back, itself included, each layer looks; None: all. One entry
            per layer, or none at all.
        embedding_dropout: of what the first layer reads.
        residual_dropout: of what each sublayer adds.
        final_dropout: of what the final norm gives.
        init_stddev: of kernels and tables; with `init_by_fan_in` that times the square root of
            the reciprocal of how many numbers a kernel adds up.
        residual_init: factor of the initial stddev of what each sublayer ends with.
        remat: what the backward pass computes again: `none`, `full` (each layer), `dots` (all
            but products with parameters).
    """

    width: int
    num_layers: int
    attention: AttentionConfig
    mlp: MlpConfig | MixtureConfig
    norm: NormConfig
    cross_attention: AttentionConfig | None = None
    norm_placement: Literal["pre", "post", "both"] = "pre"
    is_parallel: bool = False
    num_positions: int = 0
    position_offset: int = 0
    relative: RelativeConfig | None = None
    has_embedding_norm: bool = False
    has_final_norm: bool = False
    rotary: RotaryConfig | None = None
    windows: tuple[int | None, ...] = ()
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    final_dropout: float = 0.0
    init_stddev: float = 0.02
    init_by_fan_in: bool = False
    residual_init: float = 1.0
    dtype: str = "float32"
    remat: str = "none"

    @property
    def max_length(self) -> float:
        """The longest sequence that the positions reach; infinity where they are not learned."""
        return self.num_positions - self.position_offset if self.num_positions else math.inf

    def stddev(self, fan_in: int) -> float:
        """Return the initial stddev of a kernel that adds up `fan_in` numbers."""
        return self.init_stddev * (fan_in**-0.5 if self.init_by_fan_in else 1.0)

    @property
    def drops(self) -> bool:
        """Whether there is any dropout."""
        inner = self.mlp.dropout if isinstance(self.mlp, MlpConfig) else 0.0
        outer = (self.embedding_dropout, self.residual_dropout, self.final_dropout)
        return any((*outer, self.attention.dropout, inner))

    @property
    def common_window(self) -> int | None:
        """The window of all layers, where they have the same one."""
        return self.windows[0] if self.has_common_window and self.windows else None

    @property
    def has_common_window(self) -> bool:
        """Whether no layer's window differs from another's."""
        return len(set(self.windows)) <= 1

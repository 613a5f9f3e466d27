"""What a stack of equal transformer layers computes, in an encoder as in a decoder.

Frozen and hashable. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from redco_flow.models.block_config import (
    AttentionConfig,
    MixtureConfig,
    MlpConfig,
    NormConfig,
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
        windows: how many tokens back, itself included, each layer looks; None: all. One entry
            per layer, or none at all.
        embedding_dropout: of what the first layer reads.
        residual_dropout: of what each sublayer adds.
        residual_init: factor of the initial deviation of what each sublayer ends with.
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
    rotary: RotaryConfig | None = None
    windows: tuple[int | None, ...] = ()
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    init_deviation: float = 0.02
    residual_init: float = 1.0
    dtype: str = "float32"
    remat: str = "none"

    @property
    def max_length(self) -> int:
        """The longest sequence that the learned positions reach."""
        return self.num_positions - self.position_offset

    @property
    def drops(self) -> bool:
        """Whether there is any dropout."""
        inner = self.mlp.dropout if isinstance(self.mlp, MlpConfig) else 0.0
        rates = (self.embedding_dropout, self.residual_dropout, self.attention.dropout, inner)
        return any(rates)

    @property
    def common_window(self) -> int | None:
        """The window of all layers, where they have the same one."""
        return self.windows[0] if self.has_common_window and self.windows else None

    @property
    def has_common_window(self) -> bool:
        """Whether no layer's window differs from another's."""
        return len(set(self.windows)) <= 1

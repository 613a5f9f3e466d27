"""text_to_image: pictures of captions, by a small diffusion transformer in pixels.

Dims in this file: B batch.
"""

from __future__ import annotations

from typing import Any

from redco_flow.recipes.parts.images import split_by_image as split_key
from redco_flow.recipes.text_to_image.config import COLUMNS, TARGET, Settings, collate_fn

__all__ = [
    "COLUMNS",
    "TARGET",
    "Settings",
    "collate_fn",
    "init_params",
    "loss_fn",
    "output_fn",
    "pred_fn",
    "split_key",
]


def init_params(key: Any, settings: Settings) -> Any:
    """Draw the parameters."""
    from redco_flow.recipes.text_to_image.run import draw_params

    return draw_params(key, settings)


def loss_fn(
    params: Any,
    batch: Any,
    rngs: Any,
    is_training: bool,  # noqa: FBT001 (the order of all recipes)
    settings: Settings,
) -> tuple[Any, Any]:
    """Return the squared error of each example's velocity (B,), and ones (B,)."""
    from redco_flow.recipes.text_to_image.run import velocity_loss

    return velocity_loss(params, batch, rngs if is_training else None, settings)


def pred_fn(params: Any, batch: Any, rngs: Any, settings: Settings) -> Any:
    """Draw a picture of each caption: uint8, shaped like the images."""
    from redco_flow.recipes.text_to_image.run import sample

    return sample(params, batch, rngs, settings)


def output_fn(pictures: Any, settings: Settings) -> list[Any]:
    """Return each picture (H, W), or (H, W, 3) of colours; numbers from 0 to 255."""
    return [picture[..., 0] if settings.num_channels == 1 else picture for picture in pictures]

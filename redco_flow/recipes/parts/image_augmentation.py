"""Images varied in training, by each example's own key, so that draws depend on no mesh.

Dims in this file: B batch, X image side, C channels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def augment(images: jax.Array, rngs: jax.Array, *, flip: bool, shift: int) -> jax.Array:
    """Return the images (B, X, X, C), mirrored or moved.

    Args:
        rngs: a key for each (B,).
        flip: whether half of them are mirrored, left for right.
        shift: by how many pixels at most they are moved, in each direction; what comes in at a
            side repeats its last row or column.
    """
    if not flip and not shift:
        return images

    def vary(image: jax.Array, rng: jax.Array) -> jax.Array:
        to_flip, to_move = jax.random.split(rng)
        if flip:
            image = jnp.where(jax.random.bernoulli(to_flip), image[:, ::-1], image)
        if not shift:
            return image
        padded = jnp.pad(image, ((shift, shift), (shift, shift), (0, 0)), mode="edge")
        row, column = jax.random.randint(to_move, (2,), 0, 2 * shift + 1)
        return jax.lax.dynamic_slice(padded, (row, column, 0), image.shape)

    return jax.vmap(vary)(images, rngs)

"""Parameters drawn with NumPy: to compile a model's own initialisation takes a second a model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def draw_like(shapes: Any, seed: int = 0, stddev: float = 0.02) -> Any:
    """Draw arrays of these shapes: normal with the stddev of most families, norms 1, biases 0."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        if name == "scale" or name.endswith("bias"):
            return as_array(np.full(leaf.shape, float(name == "scale")), leaf.dtype)
        return as_array(stddev * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def as_array(values: np.ndarray, dtype: Any = np.float32) -> jax.Array:
    """Return what `jnp.asarray` does, which compiles a program for each shape."""
    return jax.device_put(values.astype(np.float32).astype(dtype))


def numbered(tree: Any) -> Any:
    """Return arrays of which no two numbers are equal, without a training's step."""
    return jax.tree.map(
        lambda leaf: leaf + jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape), tree
    )


def draw_params(module: Any, config: Any, seed: int = 0, stddev: float = 0.02) -> Any:
    """Draw the parameters of a model family's config."""
    return draw_like(module.abstract_params(config), seed, stddev)

"""Model families as objects: a config class, and the functions that all families of a kind share.

`DecoderFamily`, `EncoderFamily` and `EncoderDecoderFamily` are the kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, final

import flax.linen as nn
import jax

from redco_flow.models.families.family_config import ModelConfig
from redco_flow.models.hub.tensors import TensorFiles

Params = dict[str, Any]
ConfigT = TypeVar("ConfigT", bound=ModelConfig)


@dataclass(frozen=True)
class ModelFamily(ABC, Generic[ConfigT]):
    """A family; its functions take a config of the family and a dict of parameters.

    Attributes:
        Config: the class of its configs.
        IGNORED_TENSORS: patterns of tensors that published files have and that are not read.
    """

    Config: type[ConfigT]
    IGNORED_TENSORS: tuple[str, ...] = field(init=False)
    # Computes `config.core`; its method `declare` uses every parameter that there is.
    module: ClassVar[type[nn.Module]]

    @final
    def __post_init__(self) -> None:
        object.__setattr__(self, "IGNORED_TENSORS", self.Config.ignored_tensors)

    @final
    def init_params(self, config: ConfigT, key: jax.Array) -> Params:
        """Draw float32 parameters; deviations are the family's."""
        params: Params = _init_params(self.module, config.core, key)
        return params

    @final
    def abstract_params(self, config: ConfigT) -> Params:
        """Return the parameters' shapes and dtypes as `jax.ShapeDtypeStruct`s, without arrays."""
        shapes: Params = jax.eval_shape(lambda: self.init_params(config, jax.random.key(0)))
        return shapes

    @abstractmethod
    def apply(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Return the logits of a batch, given config, parameters and what the kind reads."""

    @final
    def tensor_layouts(self, config: ConfigT) -> dict[str, Any]:
        """Return a tree like the parameters that says what each is made of."""
        return config.tensor_layouts()

    @final
    def config_of_tensors(self, config: ConfigT, files: TensorFiles) -> ConfigT:
        """Return `config`, changed where a checkpoint's tensors differ from its `config.json`."""
        return config.of_tensors(files)

    @final
    def _run(self, config: ConfigT, params: Params, *inputs: Any, method: str = "__call__") -> Any:
        """Call a method of the Flax module on these parameters."""
        return self.module(config.core).apply({"params": params}, *inputs, method=method)


@partial(jax.jit, static_argnums=(0, 1))
def _init_params(module: type[nn.Module], core: Any, key: jax.Array) -> Params:
    params: Params = module(core).init(key, method="declare")["params"]
    return params

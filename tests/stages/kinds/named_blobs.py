"""A recipe of a user's own whose classes' names come from the data: which blob a point is of."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

COLUMNS = ("point", "blob")
TARGET = "blob"
TARGETS = "classes"


@dataclass(frozen=True)
class Settings:
    classes: list[str | int] = field(default_factory=list)


def init_params(key, settings):
    return {"kernel": jax.random.normal(key, (2, len(settings.classes)))}


def collate_fn(examples, settings):
    labels = [settings.classes.index(example["blob"]) for example in examples]
    points = [example["point"] for example in examples]
    return {"points": np.array(points, np.float32), "labels": np.array(labels)}


def loss_fn(params, batch, rngs, is_training, settings):
    log_probs = jax.nn.log_softmax(batch["points"] @ params["kernel"])
    return -jnp.take_along_axis(log_probs, batch["labels"][:, None], axis=1).mean()


def pred_fn(params, batch, rngs, settings):
    return (batch["points"] @ params["kernel"]).argmax(axis=-1)


def output_fn(predicted, settings):
    return [settings.classes[index] for index in predicted]

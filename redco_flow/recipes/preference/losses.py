"""Losses of pairs of answers, of how likely a model finds both: DPO, IPO, ORPO, SimPO.

Dims in this file: B pairs; 2 answers, the chosen one first.
Sources: Rafailov et al. 2023 (DPO), Mitchell 2023 (its label smoothing), Chowdhury et al. 2024
(its robust variant), Zhao et al. 2023 (SLiC, the hinge), Azar et al. 2023 (IPO), Hong et al. 2024
(ORPO), Meng et al. 2024 (SimPO). IPO's log-probabilities are means over tokens, as in TRL, so that
its target does not depend on lengths; ORPO's likelihood is the answer's alone, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from redco_flow.recipes.preference.config import Loss

# Of an answer whose every token is certain the odds would be infinite.
_LARGEST_MEAN = -1e-7


@dataclass(frozen=True)
class PairScores:
    """Log-likelihoods of both answers of each pair.

    Args:
        log_likelihoods: (B, 2), summed over the answer's tokens, in nats.
        num_tokens: (B, 2).
        reference: (B, 2), the same by the reference; None where there is none.
    """

    log_likelihoods: jax.Array
    num_tokens: jax.Array
    reference: jax.Array | None = None

    @property
    def means(self) -> jax.Array:
        """Log-likelihoods per token (B, 2)."""
        return self.log_likelihoods / self.num_tokens


def implicit_rewards(loss: Loss, scores: PairScores) -> jax.Array:
    """Return what a policy that is optimal for its loss was rewarded with, (B, 2).

    Raises:
        ValueError: the loss compares with a reference, and there is none.
    """
    if loss.type in ("orpo", "simpo"):
        return loss.strength * scores.means
    if scores.reference is None:
        raise ValueError(
            f"the loss {loss.type} compares with a reference's log-probabilities, and the examples "
            "have none: give the stage `reference_scores`."
        )
    log_ratios = scores.log_likelihoods - scores.reference
    if loss.type == "ipo":
        log_ratios = log_ratios / scores.num_tokens
    return loss.strength * log_ratios


def pair_losses(loss: Loss, scores: PairScores) -> jax.Array:
    """Return each pair's loss, (B,).

    Raises:
        ValueError: as `implicit_rewards`.
    """
    rewards = implicit_rewards(loss, scores)
    margins = rewards[:, 0] - rewards[:, 1]
    if loss.type == "ipo":
        return jnp.square(margins / loss.strength - 1 / (2 * loss.strength))
    if loss.type == "orpo":
        log_odds = _log_odds(scores.means)
        log_ratios = log_odds[:, 0] - log_odds[:, 1]
        return -scores.means[:, 0] - loss.strength * jax.nn.log_sigmoid(log_ratios)
    if loss.type == "simpo":
        return _logistic(margins - loss.gamma, loss.label_smoothing)
    if loss.variant == "hinge":
        return jax.nn.relu(1 - margins)
    if loss.variant == "robust":
        share = loss.label_smoothing
        swapped = share * jax.nn.log_sigmoid(-margins)
        return (swapped - (1 - share) * jax.nn.log_sigmoid(margins)) / (1 - 2 * share)
    return _logistic(margins, loss.label_smoothing)


def _logistic(margins: jax.Array, label_smoothing: float) -> jax.Array:
    right, wrong = jax.nn.log_sigmoid(margins), jax.nn.log_sigmoid(-margins)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def _log_odds(means: jax.Array) -> jax.Array:
    """Return log(p / (1 - p)) of probabilities per token, given as logarithms."""
    means = jnp.minimum(means, _LARGEST_MEAN)
    return means - jnp.log(-jnp.expm1(means))

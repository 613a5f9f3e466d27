"""Deriving rules ends, whatever the function is made of, and finds the layout all the same."""

import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from redco_flow.engine.sharding.two_rules import derive_rules

WIDTH, UNITS = 16, 24
X = jax.ShapeDtypeStruct((2, 6, WIDTH), jnp.float32)
PARAMS = {
    "up": jax.ShapeDtypeStruct((WIDTH, UNITS), jnp.float32),
    "down": jax.ShapeDtypeStruct((UNITS, WIDTH), jnp.float32),
}


def associative(h):
    return jax.lax.associative_scan(jnp.add, h, axis=1)


def associative_of_pairs(h):
    """A linear recurrence, as state-space models run it."""

    def join(one, two):
        return one[0] * two[0], two[0] * one[1] + two[1]

    return jax.lax.associative_scan(join, (jax.nn.sigmoid(h), h), axis=1)[1]


def reversed_and_odd(h):
    return jax.lax.associative_scan(jnp.maximum, h[:, :5], axis=1, reverse=True)


def empty(h):
    nothing = jnp.concatenate([h[:, :0], h[:, 6:]], axis=1) + h[:, 3:3]
    return jnp.concatenate([nothing, h, h[:, :0].reshape(2, 0, UNITS)], axis=1)


def looping(h):
    return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: jnp.abs(x) + 1, h)


def branching(h):
    return jax.lax.cond(jnp.sum(h) > 0, jnp.sin, lambda h: associative(h) * 2, h)


@jax.custom_vjp
def written_out(h):
    return jnp.tanh(h)


written_out.defvjp(lambda h: (jnp.tanh(h), h), lambda h, ct: (ct * h,))


@jax.custom_jvp
def pushed(h):
    return jnp.exp(h)


pushed.defjvp(lambda primals, tangents: (pushed(*primals), tangents[0] * pushed(*primals)))


def scanning(h):
    return jax.lax.scan(lambda carry, row: (carry + row, associative(carry)), h, jnp.stack([h, h]))[
        0
    ]


def gradient(h):
    return jax.grad(lambda h: jnp.sum(associative_of_pairs(h) ** 2))(h)


WHATEVER = [
    associative, associative_of_pairs, reversed_and_odd, empty, looping, branching, written_out,
    pushed, scanning, gradient,
]  # fmt: skip


@pytest.mark.parametrize(
    "whatever", WHATEVER, ids=lambda function: getattr(function, "__name__", "custom")
)
def test_a_function_that_traces_gets_its_rules_within_seconds(whatever):
    """Engine case 59: columns of the first kernel and rows of the second are split."""

    def function(params, x):
        return whatever(x @ params["up"]) @ params["down"]

    start = time.process_time()
    found = derive_rules(PARAMS, {"data": 1, "model": 4}, function, (X,))

    assert time.process_time() - start < 10
    specs = {parameter.path: parameter.spec for parameter in found.parameters}
    assert specs == {"up": P(None, "model"), "down": P("model")}


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 33])
def test_an_associative_scan_of_any_length_gets_its_rules(length):
    """Engine case 59, whatever traces, `get_sharding_rules` ends: it returns within seconds, for
    empty arrays, `associative_scan`, `while`, `cond` and custom derivatives.
    """
    x = jax.ShapeDtypeStruct((2, length, WIDTH), jnp.float32)

    def function(params, x):
        return associative_of_pairs(x @ params["up"]) @ params["down"]

    found = derive_rules(PARAMS, {"data": 1, "model": 4}, function, (x,))

    specs = {parameter.path: parameter.spec for parameter in found.parameters}
    assert specs == {"up": P(None, "model"), "down": P("model")}

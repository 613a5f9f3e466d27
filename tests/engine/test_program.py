"""Operations of compiled programs, read from their HLO."""

import jax
import jax.numpy as jnp
import pytest

from redco_flow.engine.step.program import Program, UnknownLoop

PRODUCT = """\
ENTRY %main (a: bf16[2,64,16], b: bf16[2,64,32]) -> bf16[16,32] {{
  %a = bf16[2,64,16]{{2,1,0}} parameter(0)
  %b = bf16[2,64,32]{{2,1,0}} parameter(1)
  ROOT %c = bf16[16,32]{{1,0}} convolution(%a, %b), window={{{window}}}, dim_labels={labels}
}}
"""


@pytest.mark.parametrize(
    ("window", "labels", "added_up"),
    [
        # As libtpu writes a batch of weights' gradients: of the first dim one place is not zero.
        ("size=2x2 pad=1_1x0_0 rhs_reversal=1x0", "1fb0_1i0o->b0f1", 64 * 2),
        ("size=2 pad=0_0", "0fb_0io->0bf", 64 * 2),
        ("size=2 stride=1 pad=0_0 lhs_dilate=2", "0fb_0io->0bf", 64),
    ],
)
def test_a_window_counts_what_each_of_its_dims_adds_up(window, labels, added_up):
    assert Program(PRODUCT.format(window=window, labels=labels)).flops() == 2 * 16 * 32 * added_up


def loop_of(length):
    def turn(carry, _):
        return jnp.tanh(carry @ carry), None

    return lambda x: jax.lax.scan(turn, x, None, length=length)[0]


def test_a_loops_products_count_as_often_as_it_turns():
    compiled = jax.jit(loop_of(7)).lower(jnp.ones((16, 16))).compile()

    assert Program(compiled.as_text()).flops() == 7 * 2 * 16**3


def test_products_in_a_loop_of_unknown_length_are_refused():
    def grow(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x @ x, x)

    compiled = jax.jit(grow).lower(jnp.ones((16, 16))).compile()

    with pytest.raises(UnknownLoop, match="in a loop of unknown length"):
        Program(compiled.as_text()).flops()

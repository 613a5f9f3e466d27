"""Dims as products of atoms."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from redco_flow.engine.sharding.dataflow.values import Atoms


def test_a_dim_that_is_also_two_dims_is_refined_wherever_it_occurs():
    atoms = Atoms()
    heads_and_size, elsewhere = atoms.new_dim(12), atoms.new_dim(12)
    atoms.unify(heads_and_size, elsewhere)

    heads, size = atoms.regroup(heads_and_size, (3, 4))

    assert atoms.expand(elsewhere) == (*heads, *size)
    assert (atoms.size(heads), atoms.size(size)) == (3, 4)


def test_unifying_different_factors_finds_the_common_ones():
    atoms = Atoms()
    left = (*atoms.new_dim(2), *atoms.new_dim(12))
    right = (*atoms.new_dim(6), *atoms.new_dim(4))

    assert atoms.unify(left, right)

    assert atoms.expand(left) == atoms.expand(right)
    assert [atoms.size((atom,)) for atom in atoms.expand(left)] == [2, 3, 4]


def test_factors_without_a_common_refinement_are_refused():
    atoms = Atoms()
    left = (*atoms.new_dim(2), *atoms.new_dim(3))
    right = (*atoms.new_dim(3), *atoms.new_dim(2))

    assert not atoms.unify(left, right)
    assert atoms.regroup(left, (3, 2)) is None


@given(st.lists(st.integers(2, 4), min_size=1, max_size=5), st.data())
def test_regrouping_keeps_the_product_and_the_order_of_atoms(sizes, data):
    atoms = Atoms()
    dim = tuple(atom for size in sizes for atom in atoms.new_dim(size))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sizes)))) | {len(sizes)})
    wanted = [int(np.prod(sizes[a:b])) for a, b in zip([0, *cuts], cuts, strict=False)]

    found = atoms.regroup(dim, wanted)

    assert [atoms.size(part) for part in found] == wanted
    assert tuple(atom for part in found for atom in part) == atoms.expand(dim)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_empty_dims_are_the_same_as_empty_dims_alone(pairs):
    """Engine case 59, whatever traces, `get_sharding_rules` ends: it returns within seconds, for
    empty arrays, `associative_scan`, `while`, `cond` and custom derivatives.
    """
    atoms = Atoms()
    dims = [atoms.new_dim(size) for size in (0, 0, 0, 3, 4, 12)]

    for one, other in pairs:
        sizes = atoms.size(dims[one]), atoms.size(dims[other])
        is_same = atoms.unify(dims[one], dims[other])
        assert is_same or sizes[0] != sizes[1]
        assert sizes[0] == sizes[1] or not is_same

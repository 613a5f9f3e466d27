"""Examples that collect what they train on continue where they stopped, to the last bit.

They stop between rounds, whose examples follow from the parameters so far. One does so over two
model shards, where sums in another order have no time to grow. Those that collect nothing resume
as `tests/stages/test_script.py` shows.
"""

import numpy as np
import pytest
from example_scripts import PROJECT, assert_close
from stage_kinds import script

from redco_flow.runtime.context import Stopped

pytestmark = pytest.mark.slow

SHORT = {
    "ddpg": {"num_rounds": 3, "num_updates": 4, "num_envs": 2},
    "grpo": {"share_before": 0.0, "num_rounds": 2, "num_questions": 16},
}


@pytest.mark.parametrize(("name", "num_shards_after"), [("ddpg", 2), ("grpo", 1)])
def test_an_example_stopped_in_the_middle_ends_as_one_that_was_not(
    bench, stop_at_look, name, num_shards_after
):
    if name == "ddpg":
        pytest.importorskip("gymnasium", reason="install gymnasium")

    def run(num_shards, **options):
        settings = {
            "path": str(PROJECT / "examples" / f"{name}.py"),
            "arguments": SHORT[name] | {"num_model_shards": num_shards},
            "outputs": ["params"],
        }
        made = bench.run(script, settings, **options)
        return dict(np.load(made["params"].path / "params.npz"))

    def stopping(*args, **options):
        found = context(*args, **options)
        found.stop = stop_at_look(2)
        return found

    whole = run(1)
    context = bench.context
    bench.context = stopping
    with pytest.raises(Stopped):
        run(num_shards_after, work="same")
    bench.context = context
    resumed = run(num_shards_after, work="same")

    starts = [r["start_step"] for r in bench.records() if r["kind"] == "start"]
    assert max(starts) > 0
    if num_shards_after == 1:
        for key in whole:
            np.testing.assert_array_equal(resumed[key], whole[key])
    assert_close(resumed, whole, atol=1e-5)

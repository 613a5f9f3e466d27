"""Two processes load one checkpoint together, and each reads what its devices hold."""

from pathlib import Path

import pytest

from redco_flow.models.find import find_model
from redco_flow.models.hub.pretrained import save_pretrained
from tests.drawn_params import draw_params

LLAMA = find_model("llama")
# Nearly all of it is the embedding and the head, which lie in the file as rows of the vocabulary.
CONFIG = LLAMA.Config.from_hugging_face({
    "model_type": "llama", "vocab_size": 32768, "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "bos_token_id": 2, "eos_token_id": 1,
    "tie_word_embeddings": False,
})  # fmt: skip
LOAD = """
import json, re, sys
from pathlib import Path
rank, num_processes, port = map(int, sys.argv[1:4])
directory = Path(sys.argv[4])
import jax, jax.numpy as jnp, numpy as np
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, rank)
from redco_flow import Deployer
from redco_flow.models.hub.pretrained import load_pretrained, read_model
from redco_flow.models.hub.tensors import TensorFiles

def touched_bytes():
    # What this process has of the file in its memory, page by page.
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    mapped = [part for part in parts if "model.safetensors" in part]
    return sum(int(re.search(r"Rss: +(\\d+)", part)[1]) * 1024 for part in mapped)

touched = []
def when_files_close(frame, event, argument):
    if event == "call" and frame.f_code is TensorFiles.__exit__.__code__:
        touched.append(touched_bytes())

module, config = read_model(directory)
deployer, shapes = Deployer(2), module.abstract_params(config)
ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
rules = deployer.get_sharding_rules(shapes, lambda p, ids: module.apply(config, p, ids), ids)
sys.setprofile(when_files_close)
params = load_pretrained(directory, module, config, deployer.params_sharding(shapes, rules))
sys.setprofile(None)
whole = load_pretrained(directory, module, config)
for leaf, expected in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
    for shard in leaf.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.asarray(expected)[shard.index])
held = sum(s.data.nbytes for leaf in jax.tree.leaves(params) for s in leaf.addressable_shards)
print(json.dumps({"touched": touched, "held": held}), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the kernel does not tell pages")
def test_a_process_touches_only_its_devices_shards_of_the_file(tmp_path, run_ranks):
    save_pretrained(tmp_path, LLAMA, CONFIG, draw_params(LLAMA, CONFIG))

    found = run_ranks(LOAD, 2, 1, tmp_path)

    num_bytes = (tmp_path / "model.safetensors").stat().st_size
    for one in found:
        (touched,) = one["touched"]
        # What is split by columns, and norms, are 2 % and stand in pages with the other's share;
        # and where a page is touched, the kernel maps some of its neighbours.
        assert one["held"] == pytest.approx(num_bytes / 2, rel=0.01)
        assert one["held"] <= touched + 2**20
        assert touched < 0.65 * num_bytes

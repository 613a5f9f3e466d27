"""transformers' torch model of the same config, trained eagerly; for `train_step.py`."""

import time

import torch
import transformers
from step_models import CONFIGS, collate

CLASSES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "t5": ("T5Config", "T5ForConditionalGeneration"),
}


class TorchLoop:
    """A hand-written eager loop on one batch that is there already: what a user would time."""

    def __init__(self, name: str, examples: list, num_threads: int = 2) -> None:
        torch.set_num_threads(num_threads)
        torch.manual_seed(0)
        config_class, model_class = (getattr(transformers, one) for one in CLASSES[name])
        self.model = model_class(config_class(**CONFIGS[name])).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.batch = {
            key: torch.tensor(value, dtype=torch.int64)
            for key, value in collate(name, examples).items()
        }

    def run(self, num_steps: int) -> float:
        """Train; return the seconds it took."""
        start = time.perf_counter()
        for _ in range(num_steps):
            loss = self.model(**self.batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
            self.optimizer.step()
            self.optimizer.zero_grad()
        loss.item()
        return time.perf_counter() - start


def gemm_rate(size: int = 1024, repeats: int = 20) -> float:
    """GFLOP/s of a float32 product of two square matrices."""
    a, b = torch.rand(size, size), torch.rand(size, size)
    a @ b
    start = time.perf_counter()
    for _ in range(repeats):
        a @ b
    return 2 * size**3 * repeats / (time.perf_counter() - start) / 1e9

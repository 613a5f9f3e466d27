"""Tokenizers with a chat template, trained here: transformers', and ours of the same files."""

import re

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from redco_flow.text.chat import ChatTemplate

TEXTS = [
    "What is one and two? It is three. The tool says that the answer is 3, my friend.",
    "system user assistant tool model name arguments because I thought of it. Be brief!",
]
_CONTROL = re.compile(r"<[|｜][^<>|｜]*[|｜]>|</?s>|<(?:start|end)_of_turn>|</?think>")


def make_tokenizer(template, *, eos="<|im_end|>", bos="<|begin|>"):
    """Train one whose special tokens are those that the template writes."""
    specials = sorted({*_CONTROL.findall(template), eos, bos, "<pad>"})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        bos_token=bos,
        pad_token="<pad>",
        chat_template=template,
    )


def load_template(tokenizer, directory, **kwargs):
    """Save a tokenizer of transformers and read it as this project does."""
    tokenizer.save_pretrained(directory)
    return ChatTemplate.load(directory, kwargs)

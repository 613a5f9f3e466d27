"""The chat template that preprocessing will use, as far as a plan can know it, to try rows out.

Known are named templates, files, ChatML of a trained tokenizer, and the template of a tokenizer in
a local directory. That of the hub's, and of another stage's tokenizer, is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from redco_flow.local_paths import expanded, is_folder
from redco_flow.recipes.recipe import BadExample
from redco_flow.records import read_json
from redco_flow.spec.pipeline import DataSection
from redco_flow.text.chat import (
    CHATML,
    NO_TEMPLATE,
    ChatTemplate,
    template_text,
)
from redco_flow.text.conversations import Conversation
from redco_flow.text.rendering import for_template

_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
# Where the tokenizer is not known: a template that writes one must not fail for the lack of it.
_UNKNOWN_TOKENS = {name: f"<{name}>" for name in _TOKENS}
_CONFIG_FILE, _TEMPLATE_FILE = "tokenizer_config.json", "chat_template.jinja"


@dataclass(frozen=True)
class PlannedTemplate:
    """A template, or that it is not known yet.

    Args:
        text: None where it is not known before the stage runs.
        is_missing: whether the tokenizer has none, and the pipeline names none.
        special_tokens: of the tokenizer, by name.
        kwargs: what the template gets besides the messages.
    """

    text: str | None = None
    is_missing: bool = False
    special_tokens: tuple[tuple[str, str], ...] = tuple(_UNKNOWN_TOKENS.items())
    kwargs: tuple[tuple[str, Any], ...] = ()

    def check(self, chat: Conversation, *, only_last: bool) -> None:
        """Render a conversation, where the template is known.

        Raises:
            BadExample: there is no template.
            BadConversation: the template fails, or does not let answers be distinguished.
        """
        if self.is_missing:
            raise BadExample("no chat template for messages", NO_TEMPLATE)
        if self.text is not None:
            template = _loaded(self)
            template.rendered(for_template(chat, template), only_last=only_last)


@cache
def _loaded(template: PlannedTemplate) -> ChatTemplate:
    tokens, kwargs = dict(template.special_tokens), dict(template.kwargs)
    return ChatTemplate.without_tokenizer(str(template.text), tokens, kwargs)


def planned_template(data: DataSection, *, is_of_chats: bool) -> PlannedTemplate:
    """Return what a stage's conversations will be rendered by.

    Args:
        is_of_chats: whether the recipe is of conversations, whose trained tokenizer has ChatML.
    """
    kwargs = tuple(sorted(data.chat_template_kwargs.items()))
    name, tokenizer = data.chat_template, data.tokenizer
    folder = None
    if tokenizer is not None and tokenizer.name_or_path is not None:
        path = expanded(tokenizer.name_or_path)
        folder = path if is_folder(path) else None
    tokens = tuple(_special_tokens(folder)) if folder else PlannedTemplate.special_tokens
    try:
        text = None if name is None else template_text(name)
        if text is None and tokenizer is not None and tokenizer.train is not None:
            text = CHATML if is_of_chats else ""
        if text is None and folder is not None:
            text = _template_of(folder)
    except (OSError, ValueError):  # is reported where the file or the tokenizer is checked
        text = None
    return PlannedTemplate(text or None, text == "", tokens, kwargs)


def _template_of(folder: Path) -> str | None:
    """A tokenizer's one template; empty: it has none; None: several, or not a tokenizer."""
    if (folder / _TEMPLATE_FILE).is_file():
        return (folder / _TEMPLATE_FILE).read_text("utf-8")
    if any(folder.glob("*chat_template*")) or not (folder / _CONFIG_FILE).is_file():
        return None
    found = _config_of(folder).get("chat_template", "")
    return found if isinstance(found, str) else None


def _special_tokens(folder: Path) -> Iterator[tuple[str, str]]:
    config = _config_of(folder)
    for name in _TOKENS:
        token = config.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            yield name, token


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        return dict(read_json(folder / _CONFIG_FILE).items())
    except (OSError, ValueError):
        return {}

"""Encoding of the chat recipe: conversations to token ids, with the spans that are learnt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from redco_flow.text.chat import ChatTemplate, EncodedChat, OnTooLong, TooLong, TrainOn
from redco_flow.text.conversations import BadConversation, Conversation
from redco_flow.text.pairs import EncodedPairs, Windows
from redco_flow.text.rendering import for_template
from redco_flow.text.tokenizer import FlatIds

TAKES_CONVERSATIONS = True
LEARNT = "learnt"
"""The column of the tokens that the loss is of: begin and end of each span, one after the other."""


def encode(
    chats: Sequence[str],
    template: ChatTemplate,
    *,
    train_on: TrainOn,
    max_length: int,
    on_too_long: OnTooLong,
) -> EncodedPairs:
    """Encode conversations: as target all of one, as source what asks for its last answer.

    Args:
        chats: as JSON (`Conversation.to_json`).
        train_on: whose tokens are learnt: those of the assistant's turns, of the last one, or all.
        max_length: in tokens; what is longer is cut behind, left out and counted, or unusable.

    Returns:
        What each is to be answered with are the last answer's tokens as a text. `learnt_tokens`,
        `dropped_rows`, `double_starts`, `missing_ends` and `parsed_arguments` (conversations whose
        tool calls had their arguments as JSON in a text) are counted.
    """
    length = max_length if on_too_long == "truncate" else None
    given = [Conversation.from_json(chat) for chat in chats]
    conversations = [for_template(chat, template) for chat in given]
    found = [
        TooLong(len(one.ids), max_length)
        if isinstance(one, EncodedChat) and len(one.ids) > max_length
        else one
        for one in template.encode(conversations, train_on=train_on, max_length=length)
    ]
    kept = {index: one for index, one in enumerate(found) if isinstance(one, EncodedChat)}
    bad = {index: one for index, one in enumerate(found) if isinstance(one, BadConversation)}
    dropped = [
        index for index, one in bad.items() if isinstance(one, TooLong) and on_too_long != "error"
    ]
    return EncodedPairs(
        FlatIds(one.prompt_ids for one in kept.values()),
        FlatIds(one.ids for one in kept.values()),
        [False] * len(kept),
        [one.is_cut for one in kept.values()],
        _windows(kept, template),
        more={LEARNT: FlatIds([t for span in one.learnt for t in span] for one in kept.values())},
        counts=_counts(list(kept.values()), template)
        | {
            "dropped_rows": len(dropped),
            "parsed_arguments": sum(conversations[i] is not given[i] for i in kept),
        },
        unusable=[(i, one.reason, one.detail) for i, one in bad.items() if i not in dropped],
    )


def _windows(kept: dict[int, EncodedChat], template: ChatTemplate) -> Windows:
    """Return what each kept conversation is shown with: what it is asked, and its answer."""
    tokenizer = template.tokenizer
    answers = [tokenizer.until_end(one.ids[one.start :]) for one in kept.values()]
    prompts = [one.prompt_ids for one in kept.values()]
    return Windows(
        list(kept),
        tokenizer.decode_batch(answers),
        tokenizer.backend.decode_batch(prompts, skip_special_tokens=False),
    )


def _counts(chats: Sequence[EncodedChat], template: ChatTemplate) -> dict[str, int]:
    counts: Counter[str] = Counter(
        learnt_tokens=sum(one.num_learnt for one in chats),
        missing_ends=sum(one.misses_end for one in chats),
        double_starts=sum(one.ids[:2] == [template.start_id] * 2 for one in chats),
    )
    longest = max((len(one.ids) - one.start for one in chats), default=0)
    return {**counts, "longest_answer": longest}

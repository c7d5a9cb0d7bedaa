"""The output tokens that a reply shows, read from the JSON of any of the three APIs and written back into it.

Shapes as of vLLM 0.32: ``token_ids`` beside any choice (``return_token_ids``); logprobs of /v1/completions as parallel
lists, of the others as ``content``, by text, by "token_id:N" (``return_tokens_as_token_ids``) or by integer id
(/inference/v1/generate).
"""

from __future__ import annotations

from typing import Any

import msgspec

Name = int | str
"""A token as logprobs name it: its id or its text."""
Json = dict[str, Any]

_BY_ID = "token_id:"


class Position(msgspec.Struct, frozen=True):
    """One output token, as far as the reply shows it."""

    id: int | None
    text: str
    """Its own, where the reply tells; else an equal share of the text that several tokens made."""
    field: int
    """Which of the choice's texts (thought, answer) it is part of."""
    named: Name | None = None
    """None: no logprobs."""
    listed: dict[Name, float] = {}
    """Logprobs in nats of this token and of the others that are listed at its place."""


def read(choice: Json, unseen: int) -> list[Position]:
    """Return the tokens of a choice; ``unseen``: how many they are if it shows neither ids nor logprobs."""
    ids, logprobs = choice.get("token_ids"), _logprobs(choice)
    if ids is not None and logprobs is not None and len(ids) != len(logprobs):
        logprobs = None
    count = unseen if ids is None and logprobs is None else len(logprobs or ids or [])
    names = logprobs or [(None, {})] * count
    texts = _texts(choice, names, count)
    return [Position(ids[at] if ids is not None else None, *texts[at], *names[at]) for at in range(count)]


def write(choice: Json, before: list[Position], after: list[Position]) -> None:
    """Put ``after``, as many as ``before``, in their place; what is the same object stays as it was."""
    changed = [at for at, position in enumerate(after) if position is not before[at]]
    logprobs = choice.get("logprobs") if after and after[0].named is not None else None
    for at in changed:
        position = after[at]
        if choice.get("token_ids") is not None:
            choice["token_ids"][at] = position.id
        if logprobs is not None and "tokens" in logprobs:
            logprobs["tokens"][at] = _shown(position.named)
            logprobs["token_logprobs"][at] = None if position.named is None else position.listed.get(position.named)
            if logprobs["top_logprobs"]:
                logprobs["top_logprobs"][at] = {_shown(name): position.listed[name] for name in _ordered(position)}
        elif logprobs is not None:
            old = logprobs["content"][at]
            entries = [_entry(position, name, old) for name in _ordered(position)]
            kept = len(old.get("top_logprobs") or [])
            logprobs["content"][at] = entries[0] | {"top_logprobs": entries[:kept]}
    for number, (place, key) in enumerate(_fields(choice)):
        place[key] = "".join(position.text for position in after if position.field == number)


def blank(choice: Json) -> None:
    """Leave a choice without tokens."""
    _place(choice).pop("tool_calls", None)
    if choice.get("token_ids") is not None:
        choice["token_ids"] = []
    if choice.get("logprobs") is not None:
        choice["logprobs"] = None
    for place, key in _fields(choice):
        place[key] = ""


def shows_tokens(choice: Json) -> bool:
    """Say whether any token, or text of one, stands in it."""
    return bool(choice.get("token_ids") or _fields(choice) or _place(choice).get("tool_calls"))


def _place(choice: Json) -> Json:
    """What holds the texts."""
    place: Json = choice if "text" in choice else choice.get("delta") or choice.get("message") or {}
    return place


def _fields(choice: Json) -> list[tuple[Json, str]]:
    """Where its texts stand, in order."""
    place = _place(choice)
    return [(place, key) for key in ("text", "reasoning", "content") if place.get(key)]


def _texts(choice: Json, names: list[tuple[Name | None, dict[Name, float]]], count: int) -> list[tuple[str, int]]:
    """The text of each token, and the number of the field that it is part of."""
    fields = [str(place[key]) for place, key in _fields(choice)]
    own = [name for name, _ in names if isinstance(name, str)]
    if len(fields) == 1 and len(own) == count and "".join(own) == fields[0]:
        return [(text, 0) for text in own]
    total, at, texts = sum(map(len, fields)), 0, list[tuple[str, int]]()
    for number, text in enumerate(fields):
        at += len(text)
        share = round(count * at / total) - len(texts)
        texts += [
            (text[len(text) * piece // share : len(text) * (piece + 1) // share], number) for piece in range(share)
        ]
    return texts or [("", 0)] * count


def _logprobs(choice: Json) -> list[tuple[Name | None, dict[Name, float]]] | None:
    """What stands at each place: the token's name, and all names with their logprobs. None: nothing is listed."""
    logprobs = choice.get("logprobs") or {}
    if logprobs.get("tokens") is not None:
        tops = logprobs["top_logprobs"] or [None] * len(logprobs["tokens"])
        rows = zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
        places = [
            (_name(token), [*((_name(other), value) for other, value in (top or {}).items()), (_name(token), own)])
            for token, own, top in rows
        ]
    elif logprobs.get("content") is not None:
        places = [
            (_named(entry), [(_named(each), each["logprob"]) for each in (*(entry.get("top_logprobs") or ()), entry)])
            for entry in logprobs["content"]
        ]
    else:
        return None
    return [(name, {each: value for each, value in pairs if value is not None}) for name, pairs in places]


def _named(entry: Json) -> Name:
    return int(entry["token_id"]) if "token_id" in entry else _name(entry["token"])


def _name(shown: str) -> Name:
    digits = shown.removeprefix(_BY_ID)
    return int(digits) if shown.startswith(_BY_ID) and digits.isdecimal() else shown


def _shown(name: Name | None) -> str:
    return f"{_BY_ID}{name}" if isinstance(name, int) else str(name)


def _ordered(position: Position) -> list[Name]:
    """As vLLM lists them: the token itself first, then the others from the most likely one."""
    return sorted(position.listed, key=lambda name: (name != position.named, -position.listed[name]))


def _entry(position: Position, name: Name, like: Json) -> Json:
    logprob = position.listed[name]
    if "token_id" in like:
        rank = 1 + sum(other > logprob for other in position.listed.values())
        return {"token_id": name, "logprob": logprob, "rank": rank}
    shown = _shown(name)
    return {"token": shown, "logprob": logprob, "bytes": list(shown.encode("utf-8", "replace"))}

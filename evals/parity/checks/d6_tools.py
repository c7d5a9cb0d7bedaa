"""D6: tool calls name declared tools, with arguments that fit the tool's schema, whatever tool_choice says.

Prompts and tools are invented. Most prompts suit one tool; of those with tool_choice "auto" a quarter suit none, so
that whether a tool is called at all can be compared as well. With "required" or a named tool schemas are strict: the
server holds the model to them, and since they are small a call takes tens of tokens. With "auto" the model is free.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import msgspec
from msgspec.structs import replace

from evals.parity.asking import case, chat, groups, lots, of_chat, record, width, words_digest
from evals.parity.check import Budget, Check, Given, Situation
from evals.parity.endpoint import Chat, ChatReply
from evals.parity.questions import question
from evals.records import Case
from workloads.content import stable_random

WIDTH = 32
REQUESTS: dict[Budget, dict[str, int]] = {
    "quick": {"auto": 16, "required": 64, "named": 168},
    "standard": {"auto": 400, "required": 400, "named": 900},
    "full": {"auto": 1200, "required": 1200, "named": 1600},
}
"""By tool_choice. 1,293 calls tell 1 % of broken ones from none (power .9, alpha .01); 230 have one (power .9)."""
UNSUITED = 0.25
"""Of the prompts with "auto": share that no tool suits."""

TOKENS: dict[Budget, int] = {"quick": 96, "standard": 1024, "full": 2048}
"""At most: a model may think first."""


_WORDS: dict[str, list[Any]] = {
    "room": ["Attic", "Cellar", "Library"],
    "hour": list(range(8, 19)),
    "lamp": ["desk", "hall", "porch"],
    "article": ["lantern", "kettle", "umbrella", "violin"],
    "shop": ["Vexford", "Zellbach", "Overmill"],
    "switch": [True, False],
}
"""What prompts say, and arguments may be."""
_TYPES = {"hour": "integer", "switch": "boolean"}


def _tool(name: str, does: str, *words: str) -> dict[str, Any]:
    properties = {word: {"type": _TYPES.get(word, "string"), "enum": _WORDS[word]} for word in words}
    schema = {"type": "object", "properties": properties, "required": list(words), "additionalProperties": False}
    return {"name": name, "description": does, "parameters": schema}


TOOLS = [
    _tool("book_room", "Book a room of the club for an hour", "room", "hour"),
    _tool("set_lamp", "Switch a lamp on or off", "lamp", "switch"),
    _tool("check_stock", "Look up how many of an article a shop has", "article", "shop"),
    _tool("send_parcel", "Send an article to a shop", "article", "shop", "hour"),
]
_PROMPTS = {
    "book_room": "Could I have the {room} at {hour} o'clock?",
    "set_lamp": "It is too dark here: please turn the {lamp} lamp on.",
    "check_stock": "How many pieces of the {article} are left in {shop}?",
    "send_parcel": "Have a {article} sent to {shop}; it should leave at {hour}.",
}
_VALIDATORS = {tool["name"]: jsonschema.Draft202012Validator(tool["parameters"]) for tool in TOOLS}

_A_CALL = re.compile(r"</?\|?tool|\[TOOL_CALLS|\"arguments\"\s*:|" + "|".join(_VALIDATORS))
"""What text looks like that should have been a call."""


def _cases(situation: Situation) -> list[Case]:
    tokens = 0, TOKENS[situation.budget]
    asked = [
        {"variant": choice, "batch": len(lot)}
        for choice, count in REQUESTS[situation.budget].items()
        for lot in lots(count, width(situation, WIDTH))
        for _ in lot
    ]
    cases = [case(situation, "D6", number, number, tokens, **how) for number, how in enumerate(asked)]
    return [replace(each, prompt_digest=words_digest(_chat(each))) for each in cases]


def _suits(case: Case) -> str:
    """The tool that the prompt asks for."""
    return list(_PROMPTS)[case.prompt_seed % len(_PROMPTS)]


def _chat(case: Case) -> Chat:
    tool, random = _suits(case), stable_random("parity tools", case.prompt_seed).random
    words = {name: values[int(random() * len(values))] for name, values in _WORDS.items()}
    prompt = _PROMPTS[tool].format(**words)
    if case.variant == "auto" and random() < UNSUITED:
        prompt = question(case.prompt_seed)
    choice = {"type": "function", "function": {"name": tool}} if case.variant == "named" else case.variant
    strict = {} if case.variant == "auto" else {"strict": True}
    tools = [{"type": "function", "function": tool | strict} for tool in TOOLS]
    asked = chat(case).body
    return Chat(body=asked | {"messages": [{"role": "user", "content": prompt}], "tools": tools, "tool_choice": choice})


async def _run(given: Given, cases: Sequence[Case]) -> None:
    for group in groups(cases):
        replies = await given.endpoint.chat([_chat(each) for each in group])
        for each, reply in zip(group, replies, strict=True):
            record(given, each, of_chat(reply), **({} if reply.error else _facts(each, reply)))


def _facts(case: Case, reply: ChatReply) -> dict[str, Any]:
    """Fields of ParityReply on the calls of a reply."""
    named = _suits(case) if case.variant == "named" else None
    broken = next(filter(None, (_broken(*call, named) for call in reply.tool_calls)), None)
    if not reply.tool_calls and case.variant != "auto":
        broken = "no call"
    if broken and reply.finish_reason == "length":
        broken = "the limit of tokens cut it"
    return {
        "called": bool(reply.tool_calls),
        "valid_call": broken is None if reply.tool_calls or broken else None,
        "problem": broken or _misplaced(case, reply),
    }


def _broken(name: str, arguments: str, named: str | None) -> str | None:
    """What is wrong with a call."""
    if name not in _VALIDATORS:
        return "undeclared tool"
    if named not in (None, name):
        return "another tool than the named one"
    try:
        given = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return "arguments are no JSON"
    return None if _VALIDATORS[name].is_valid(given) else "arguments do not fit the schema"


def _misplaced(case: Case, reply: ChatReply) -> str | None:
    """What is wrong around calls. A named tool's call ends with "stop", as in OpenAI's API."""
    if not reply.tool_calls:
        return "a call in the text" if _A_CALL.search(reply.text or "") else None
    right = ("tool_calls",) if case.variant != "named" else ("stop", "tool_calls")
    return None if reply.finish_reason in right else f"finish reason {reply.finish_reason} with a call"


CHECK = Check(
    id="D6",
    title="Tool calls",
    finds="calls that are cut, malformed, undeclared, or left in the text",
    statistic="share of valid calls; whether a tool is called, against the baseline",
    needs=frozenset({"chat", "tools"}),
    cases=_cases,
    run=_run,
)

"""Tool calls: one that fits its tool's schema, drawn from a number."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from replay.emulator import language
from replay.emulator.noise import mix, text_number
from replay.emulator.requests import Refused, ToolChoice


class Call(NamedTuple):
    """One call of a tool."""

    name: str
    arguments: str
    """JSON."""


def call(tools: bytes, choice: ToolChoice, luck: int) -> Call | None:
    """Return the call that a chat answers with; None where it answers in words.

    ``tools`` is the request's list as JSON. With ``choice`` "auto" half of the numbers ``luck`` lead to a call. Raises
    Refused for a choice or a list of tools that cannot be followed.
    """
    if choice == "none" or (choice == "auto" and (not tools or mix(luck, 0x7001) & 1)):
        return None
    try:
        functions = [tool["function"] for tool in msgspec.json.decode(tools or b"[]")]
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    except (KeyError, TypeError, AttributeError, msgspec.DecodeError):
        raise Refused(
            400, "tools must be a list of {type: function, function: {name, parameters}}", param="tools"
        ) from None
    names = list(schemas) if isinstance(choice, str) else [choice.function.name]
    if not names:
        raise Refused(400, "When using `tool_choice`, `tools` must be set.", param="tool_choice")
    if names[0] not in schemas:
        raise Refused(
            400, "The tool specified in `tool_choice` does not match any of the specified `tools`", param="tool_choice"
        )
    name = names[mix(luck, 0x7002) % len(names)]
    return Call(name, msgspec.json.encode(value(schemas[name], luck)).decode())


def value(schema: dict[str, Any], luck: int) -> Any:
    """Return a value that fits a JSON schema of types, enums, required properties and least lengths."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][mix(luck, 0x7003) % len(schema["enum"])]
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return value(schema[several][0], luck)
    kinds = schema.get("type", "object")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if kind == "object":
        properties = schema.get("properties", {})
        return {
            name: value(properties.get(name, {"type": "string"}), mix(luck, text_number(name)))
            for name in schema.get("required", ())
        }
    if kind == "array":
        return [value(schema.get("items", {"type": "string"}), mix(luck, i)) for i in range(schema.get("minItems", 1))]
    if kind == "boolean":
        return bool(mix(luck, 0x7004) & 1)
    if kind == "null":
        return None
    if kind in ("integer", "number"):
        low = schema.get("minimum", 0)
        return low + mix(luck, 0x7005) % (int(schema.get("maximum", low + 99) - low) + 1)
    words = 1 + schema.get("minLength", 0) // 5
    return " ".join(language.WORDS[mix(luck, i, 0x7006) % len(language.WORDS)][1:] for i in range(words))

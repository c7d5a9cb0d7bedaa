"""The part of README.md that is made: ``python -m tests.readme`` writes it anew from the experiment's own schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay.experiment import Experiment

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- keys: made by python -m tests.readme -->\n", "<!-- end of keys -->"


def keys() -> str:
    """One table row for each key of the experiment file: name, default, meaning."""
    schema = Experiment.model_json_schema()
    rows = ["| key | default | meaning |", "|---|---|---|"]
    rows += _rows(schema, schema, "")
    return "\n".join(rows) + "\n"


def _rows(schema: dict[str, Any], part: dict[str, Any], prefix: str) -> list[str]:
    rows = []
    required = part.get("required", [])
    for name, field in part["properties"].items():
        reference = field.get("$ref") or next((o["$ref"] for o in field.get("anyOf", []) if "$ref" in o), None)
        inner = schema["$defs"][reference.rsplit("/", 1)[1]] if reference else None
        meaning = " ".join(str(field.get("description") or (inner or {}).get("description", "")).split())
        if meaning.startswith("See "):
            meaning = " ".join(str((inner or {}).get("description", "")).split())
        default = "required" if name in required else _default(field, inner)
        rows.append(f"| `{prefix}{name}` | {default} | {meaning.replace('|', ', ')} |")
        # the candidate's keys are the baseline's
        if inner is not None and name != "candidate":
            rows += _rows(schema, inner, f"{prefix}{name}.")
    return rows


def _default(field: dict[str, Any], inner: dict[str, Any] | None) -> str:
    if inner is not None or "default" not in field:
        return "–"
    value = field["default"]
    return (
        "–" if value is None or value in ({}, []) else f"`{str(value).lower() if isinstance(value, bool) else value}`"
    )


def updated(text: str) -> str:
    """README's text with the made part as it should be."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return before + START + keys() + END + after


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))

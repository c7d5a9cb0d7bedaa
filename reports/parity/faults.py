"""Which checks are to see which fault: accuracy.md, section (f), and evals/faults/registry.py, as a test holds."""

from __future__ import annotations

CAUGHT_BY: dict[str, tuple[int, tuple[str, ...]]] = {
    "flip-token": (1, ("P2", "P3")),
    "truncate-at": (2, ("D2", "L1")),
    "drop-last-chunk": (3, ("D1",)),
    "repeat-after": (4, ("L2", "L1", "P1")),
    "kv-beyond": (5, ("P5",)),
    "prefix-off-by-one": (6, ("D5", "P4")),
    "ignore-temperature": (7, ("D3",)),
    "ignore-top-p": (8, ("D3",)),
    "batch-corrupts": (9, ("P6",)),
    "race": (10, ("P7", "P2")),
    "ignore-seed": (11, ("D4", "D3")),
    "shared-seed": (11, ("D4", "D3")),
    "stale-replies": (12, ("V4", "V1")),
    "never-specialised": (13, ("V2", "V1")),
    "neighbour-leak": (14, ("P6",)),
    "state-drift": (15, ("P1",)),
    "early-stop": (16, ("L1", "P1")),
    "nan-zero": (17, ("D7",)),
    "cut-tools": (18, ("D6",)),
    "padded-batch": (19, ("P6",)),
    "low-precision": (20, ("P1", "F1")),
}
"""Number and checks, the main one first. Faults that are not here are controls that nobody may see."""

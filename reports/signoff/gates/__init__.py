"""The gates of the sign-off, in the order of the document. To add one, write its file and list it here."""

from __future__ import annotations

from reports.signoff.gates import (
    accuracy,
    controls_hold,
    exam_path,
    hygiene,
    length_stops,
    one_difference,
    parity,
    parts_measured,
    plan_kept,
    prompts_same,
    replayed,
)
from reports.signoff.gates.evidence import Judge

GATES: list[Judge] = [
    parts_measured.judge,
    plan_kept.judge,
    one_difference.judge,
    prompts_same.judge,
    hygiene.judge,
    length_stops.judge,
    exam_path.judge,
    controls_hold.judge,
    accuracy.judge,
    parity.judge,
    replayed.judge,
]

"""The checks of the battery, in the order in which they are asked.

P2 (outliers) is no check of its own: it is judged on what P1 and P7 record. V1 to V4 and F1 are judged on what
manifests, step logs, cases, replies and evals tell anyway.
"""

from __future__ import annotations

from evals.parity.check import Check
from evals.parity.checks import (
    d1_streams,
    d2_lengths,
    d3_sampler,
    d4_neighbours,
    d5_prefix,
    d6_tools,
    d7_garbage,
    l1_lengths,
    l2_repetition,
    p1_replay,
    p3_divergence,
    p4_cut_points,
    p5_contexts,
    p6_batches,
    p7_soak,
    s1_acceptance,
    t0,
)

_BATTERY = [
    t0,
    d1_streams,
    d2_lengths,
    d3_sampler,
    d4_neighbours,
    d5_prefix,
    d6_tools,
    d7_garbage,
    p1_replay,
    p3_divergence,
    p4_cut_points,
    p5_contexts,
    p6_batches,
    p7_soak,
    s1_acceptance,
    l1_lengths,
    l2_repetition,
]

CHECKS: dict[str, Check] = {each.CHECK.id: each.CHECK for each in _BATTERY}

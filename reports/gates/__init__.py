"""The gates, in the order of the report. To add one, write its file and list it here."""

from __future__ import annotations

from reports.gates import (
    acceptance_parity,
    balanced_order,
    blocks_finished,
    cache_parity,
    client_health,
    error_rate,
    matched_gpus,
    noise_floor,
    output_lengths,
    pair_coverage,
    path_proof,
    prompt_length,
    same_work,
    server_survived,
    server_timing,
    server_to_itself,
    server_unchanged,
    silence,
    token_source,
    turns_accounted,
)
from reports.gates.gate import Judge

GATES: list[Judge] = [
    same_work.judge,
    blocks_finished.judge,
    server_survived.judge,
    turns_accounted.judge,
    pair_coverage.judge,
    error_rate.judge,
    silence.judge,
    matched_gpus.judge,
    server_to_itself.judge,
    server_unchanged.judge,
    balanced_order.judge,
    cache_parity.judge,
    token_source.judge,
    prompt_length.judge,
    output_lengths.judge,
    acceptance_parity.judge,
    path_proof.judge,
    noise_floor.judge,
    client_health.judge,
    server_timing.judge,
]

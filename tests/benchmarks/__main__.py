"""``python -m tests.benchmarks [--runs N] [CASE ...]``: run the cases, print each figure's best of N beside its target.

This process runs on the last core that it may use, servers on the first. Repeats are whole runs of a case; the best is
given because whatever else runs on the machine can only make a figure worse, and the median beside it to show how much.
A case is a function without arguments that returns rows; add one to CASES.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable

from tests.benchmarks import error_rates_case, faults_case, kineto_case, peers, replay_cases, step_log_case, wire_cases
from tests.benchmarks.wire_cases import CLIENT_CORE, SERVER_CORE, Row

CASES: dict[str, Callable[[], list[Row]]] = {
    "requests": wire_cases.requests_per_second,
    "chunks": wire_cases.chunks_per_second,
    "truth-64": wire_cases.truth_64,
    "truth-256": wire_cases.truth_256,
    "truth-emulator": replay_cases.emulator_truth,
    "bodies": replay_cases.bodies,
    "corpus": replay_cases.big_corpus,
    "real": replay_cases.real_sessions,
    "kineto": kineto_case.read,
    "step-log": step_log_case.record,
    "step-log-vllm": step_log_case.real_server,
    "error-rates": error_rates_case.error_rates,
    "faults": faults_case.faults,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Measure decodegate's own speed.")
    parser.add_argument("cases", nargs="*", help=f"of: {', '.join([*CASES, 'peers'])}; default: all")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    if unknown := set(options.cases) - {*CASES, "peers"}:
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    missed = 0
    print(f"client on core {CLIENT_CORE}, servers on core {SERVER_CORE}, best of {options.runs} (median)", flush=True)
    for name, case in CASES.items():
        if options.cases and name not in options.cases:
            continue
        os.sched_setaffinity(0, {CLIENT_CORE})  # a case may have taken all cores
        print(f"\n{name}: {(case.__doc__ or '').strip()}", flush=True)
        for rows in zip(*(case() for _ in range(options.runs)), strict=True):
            text = line(list(rows))
            missed += text.endswith("MISSED")
            print(text, flush=True)
    if not options.cases or "peers" in options.cases:
        os.sched_setaffinity(0, {CLIENT_CORE})
        print("\npeers, same servers and cores, one run each", flush=True)
        peers.run()
    sys.exit(1 if missed else 0)


def line(rows: list[Row]) -> str:
    """One figure over all runs."""
    values = [row.value for row in rows]
    first = rows[0]
    best = max(values) if first.better == "more" else min(values)
    text = f"  {first.name:<52} {best:>12,.2f} {first.unit:<4} ({statistics.median(values):,.2f})"
    if first.target is None:
        return text
    met = best >= first.target if first.better == "more" else best <= first.target
    return f"{text}  target {'>=' if first.better == 'more' else '<='} {first.target:,g}: {'met' if met else 'MISSED'}"


if __name__ == "__main__":
    main()

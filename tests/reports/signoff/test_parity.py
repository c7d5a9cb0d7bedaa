"""Output parity in the sign-off: its gates, its part of the document, and its section of the page."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace

from reports.render.json import strict
from reports.signoff.cli import json_schema
from reports.signoff.document import signoff
from reports.signoff.gates import parity as gates
from reports.signoff.gates.evidence import Evidence
from reports.signoff.page import html, markdown
from reports.signoff.parts import load
from reports.signoff.result import Gate, Signoff
from tests.reports.parity import made
from tests.reports.parity.test_verdict import on_candidate, problem
from tests.reports.signoff import sat

CHECKS = ["D7", "P3", "P6"]


@pytest.fixture(scope="module")
def harmed(tmp_path_factory: pytest.TempPathFactory) -> Signoff:
    """A run of parity alone, with garbage in one reply of each of the candidate's arms."""
    run = tmp_path_factory.mktemp("harmed")
    made.write(
        run, on_candidate(problem("invalid UTF-8", 5), "D7"), checks=CHECKS, arms=(*made.ARMS, "X"), fault="nan-zero"
    )
    return signoff(run)


def judged(run: Path) -> dict[str, Gate]:
    return {each.id: each for each in gates.judge(Evidence(load(run), [], []))}


def test_without_parity_there_is_no_pass(tmp_path: Path) -> None:
    found = signoff(sat.write(tmp_path / "run", [sat.exam("aime25", 30, 8, 0.9)]))
    assert found.parity is None
    gate = next(each for each in found.gates if each.id == "parts_measured")
    assert gate.outcome == "INCONCLUSIVE"
    assert any("decodegate parity" in reason for reason in gate.reasons)
    assert not any(each.id.startswith("parity") for each in found.gates)


def test_harm_is_a_fail_that_names_its_reproducer(harmed: Signoff) -> None:
    assert harmed.outcome == "FAIL"
    outcomes = {each.id: each.outcome for each in harmed.gates}
    assert outcomes["parity_replies"] == "FAIL"
    assert outcomes["parity_tokens"] == "INCONCLUSIVE"  # P1 and others were not planned
    assert outcomes["parity"] == "INCONCLUSIVE"  # a quick battery
    assert harmed.reasons == [
        "Parity: replies: D7 Garbage: B1: 1 of 476 replies: invalid UTF-8; of the baseline none of 952.",
        "Parity: replies: D7 Garbage: B2: 1 of 476 replies: invalid UTF-8; of the baseline none of 952.",
    ]
    for page in (html(harmed), markdown(harmed)):
        assert "Smallest reproducer: D7 case 5 on B1" in page
        assert "free greedy" in page


def test_the_section_has_checks_strata_curves_and_faults(harmed: Signoff) -> None:
    page = html(harmed)
    for title in ("Checks", "By batch, context and kind of request", "First divergence", "Fault, expected check, seen"):
        assert f"<h3>{title}" in page
    assert 'aria-label="First divergence: free greedy"' in page
    assert 'aria-label="P6 Batches and churn: KL by batch"' in page
    assert "nan-zero" in markdown(harmed)
    control = next(each for each in harmed.controls if "nan-zero" in each.name)
    assert control.holds is False  # nothing was put in: the checks must say so
    assert control.seen == "seen by no check"


def test_the_document_fits_its_schema(harmed: Signoff) -> None:
    jsonschema.validate(json.loads(strict(harmed)), json.loads(json_schema()))


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    made.write(tmp_path, checks=["P3"])
    assert strict(signoff(tmp_path)) == strict(signoff(tmp_path))


def test_what_a_check_could_not_look_at_is_not_covered(tmp_path: Path) -> None:
    situation = replace(made.SITUATION, has=made.SITUATION.has - {"tools"})
    made.write(tmp_path, checks=["D6", "D7"], situation=situation)
    found = signoff(tmp_path)
    assert "Output parity: Tool calls: needs tools" in found.not_covered
    assert not any("D6" in reason for each in found.gates for reason in each.reasons)


def test_order_is_a_gate(tmp_path: Path) -> None:
    folder = made.write(tmp_path, on_candidate(problem("invalid UTF-8", 5), "D7"), checks=["D7"])
    made.fix_floor(folder, made.START + 900)
    found = judged(tmp_path)
    assert "after the candidate's first request" in found["parity"].reasons[0]
    assert {each.outcome for each in found.values()} <= {"INCONCLUSIVE", "PASS"}

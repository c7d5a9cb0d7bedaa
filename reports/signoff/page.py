"""The sign-off document as text: what HTML and Markdown share is made here, in words."""

from __future__ import annotations

import msgspec

from evals.records import TaskPlan
from reports.accuracy.result import Counts, Measured, Stratum, TaskVerdict
from reports.accuracy.tasks import KINDS
from reports.charts.chart import svg_of
from reports.render import words
from reports.render.page import TEMPLATES, template_of
from reports.signoff.charts import by_context, forest
from reports.signoff.grid import Grid, Row, plain
from reports.signoff.parity_charts import by_stratum, survival
from reports.signoff.parity_page import checks, divergences, fault, parity_facts, strata
from reports.signoff.result import Control, ExamPath, Fact, Gate, Signoff


class Benchmark(msgspec.Struct, frozen=True):
    """One benchmark's own part of the document."""

    task: TaskVerdict
    facts: list[tuple[str, str]]
    grids: list[tuple[str, Grid]]


def markdown(signoff: Signoff) -> str:
    """Without charts."""
    return template_of("signoff/page.md").render(**_context(signoff))


def html(signoff: Signoff) -> str:
    """One file that needs nothing else."""
    css = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    whole = forest(signoff.tasks)
    figures = {task.task: by_context(task, list(task.counts)) for task in signoff.tasks}
    charts = {name: [(each, svg_of(each.chart, each.id, each.title)) for each in of] for name, of in figures.items()}
    drops = (whole, svg_of(whole.chart, whole.id, whole.title)) if whole is not None else None
    shown = [*survival(signoff.parity), *by_stratum(signoff.parity)] if signoff.parity is not None else []
    parity = [(each, svg_of(each.chart, each.id, each.title)) for each in shown]
    return template_of("signoff/page.html").render(
        css=css, charts=charts, drops=drops, parity_charts=parity, **_context(signoff)
    )


def _context(signoff: Signoff) -> dict[str, object]:
    return {
        "s": signoff,
        "tags": [stamp.split(":")[0] for stamp in signoff.stamps],
        "colours": _COLOURS,
        "long": _long,
        "measured": f"{signoff.measured_utc or 'not'}{f' by {signoff.measured_by}' if signoff.measured_by else ''}",
        "missing": missing(signoff),
        "glance": _glance(signoff),
        "scope": _listed(signoff.scope),
        "parts": _parts(signoff),
        "arms": _arms(signoff),
        "files": _files(signoff),
        "data": _data(signoff),
        "registered": _registered(signoff),
        "planned": _planned(signoff),
        "coverage": Grid(_COVERAGE, [_path(each) for each in signoff.coverage], right=(1, 3, 4, 5)),
        "controls": Grid(_CONTROLS, [_control(each) for each in signoff.controls], right=(4,)),
        "gates": Grid(_GATES, [_gate(each) for each in signoff.gates], right=(2, 3)),
        "accuracy": _accuracy(signoff),
        "benchmarks": [_benchmark(task) for task in signoff.tasks],
        "parity": [(title, grid) for title, grid in _parity(signoff) if grid.rows],
        "parity_facts": parity_facts(signoff.parity) if signoff.parity is not None else [],
        "speed": _listed(signoff.speed),
        "reproduction": _listed(signoff.reproduction),
        "inputs": plain(["file", "SHA-256"], [list(each) for each in signoff.inputs.items()]),
    }


def _listed(facts: list[Fact]) -> list[tuple[str, str]]:
    return [(each.name, each.value) for each in facts]


def missing(signoff: Signoff) -> list[str]:
    """What stands open, each with what to do; what the document's reasons say is not said again."""
    found = [(each.title, each.summary) for each in signoff.parts if not each.measured]
    found += [
        (gate.title, reason)
        for gate in signoff.gates
        if gate.outcome == "INCONCLUSIVE"
        for reason in gate.reasons or [gate.said]
    ]
    found += [("Control that was not run", each.name) for each in signoff.controls if each.holds is None]
    titles: dict[str, list[str]] = {}
    for title, what in found:
        titles.setdefault(what, []).append(title)
    return [
        f"{', '.join(of)}: {what}"
        for what, of in titles.items()
        if not any(reason.rstrip(".").endswith(what.rstrip(".")) for reason in signoff.reasons)
    ]


def _long(text: str) -> bool:
    """Has a word, such as a hash, that a cell must be able to break."""
    return max(map(len, text.split()), default=0) > _LONGEST_WORD


_LONGEST_WORD = 36
_COLOURS = {
    "PASS": "pass", "FAIL": "fail", "INCONCLUSIVE": "unknown",
    "held": "pass", "did not hold": "fail", "not run": "unknown", "not measured": "unknown",
}  # fmt: skip
"""Of the words that a reader looks for."""


def _held(control: Control) -> str:
    return {True: "held", False: "did not hold", None: "not run"}[control.holds]


def _glance(signoff: Signoff) -> Grid:
    """One row for each thing that is looked for first, named as its section is."""
    gates: list[tuple[str, str]] = [(gate.outcome, gate.title) for gate in signoff.gates]
    controls = [(_held(each), each.name) for each in signoff.controls]
    candidate = signoff.arms[-1].name if signoff.arms else ""
    shares = [
        f"{KINDS[each.task].title} "
        + (f"{words.share(each.share)} {each.counted}" if each.share is not None else "unknown")
        for each in signoff.coverage
        if each.backend == candidate and not each.stratum
    ]
    rows = [
        ("Gates", _tally(gates, "PASS", ("FAIL", "INCONCLUSIVE"))),
        ("Accuracy", "; ".join(map(_brief, signoff.tasks))),
        ("Output parity", _parity_brief(signoff)),
        ("Decode path", f"decode tokens of {candidate}: {', '.join(shares)}" if shares else ""),
        ("Controls", _tally(controls, "held", ("did not hold", "not run"))),
        ("Speed", "; ".join(f"{each.name} {each.value}" for each in signoff.speed)),
    ]
    return Grid(["", ""], [Row([(name, ""), (found or "nothing is known", "")]) for name, found in rows])


def _parity(signoff: Signoff) -> list[tuple[str, Grid]]:
    """The tables of the section, with their titles."""
    found = signoff.parity
    if found is None:
        return []
    return [
        ("Checks", checks(found)),
        ("By batch, context and kind of request", strata(found)),
        ("First divergence", divergences(found)),
        ("Fault, expected check, seen, at which n", fault(found)),
    ]


def _parity_brief(signoff: Signoff) -> str:
    found = signoff.parity
    if found is None:
        return ""
    outcomes = [(each.outcome, each.id) for each in found.checks]
    counted = _tally([each for each in outcomes if each[0] != "not run"], "PASS", ("FAIL", "INCONCLUSIVE"))
    none = ", ".join(id for outcome, id in outcomes if outcome == "not run")
    return f"{found.outcome}: {counted}" + (f"; not run: {none}" if none else "")


def _tally(found: list[tuple[str, str]], good: str, others: tuple[str, str]) -> str:
    """ "5 of 7 PASS; FAIL: MRCR"."""
    if not found:
        return ""
    named = {other: ", ".join(name for outcome, name in found if outcome == other) for other in others}
    count = f"{sum(outcome == good for outcome, _ in found)} of {len(found)} {good}"
    return "; ".join([count, *(f"{other}: {names}" for other, names in named.items() if names)])


def _brief(task: TaskVerdict) -> str:
    drop = task.measured.drop if task.measured else None
    if drop is None:
        return f"{task.title} {task.outcome}, nothing compared"
    most = f", at most {_points(drop.bound)}" if drop.bound is not None else ""
    return f"{task.title} {task.outcome}, drop {_points(drop.value)}{most}, margin {_points(task.margin)}"


def _parts(signoff: Signoff) -> Grid:
    head = ["part", "", "begun", "by", "with decodegate", "what it says"]
    return plain(
        head,
        [
            [
                each.title,
                "measured" if each.measured else "not measured",
                each.measured_utc or words.DASH,
                each.measured_by or words.DASH,
                each.decodegate_version or words.DASH,
                each.summary,
            ]
            for each in signoff.parts
        ],
        right=(2, 3),
    )


def _arms(signoff: Signoff) -> Grid:
    return _beside(signoff, [{"Decode backend": arm.decode_backend, **arm.facts} for arm in signoff.arms])


def _files(signoff: Signoff) -> Grid:
    return _beside(signoff, [arm.files for arm in signoff.arms])


def _beside(signoff: Signoff, sides: list[dict[str, str]]) -> Grid:
    """Facts of the arms by name, those that differ marked."""
    rows = []
    for name in dict.fromkeys(name for side in sides for name in side):
        values = [side.get(name) or words.DASH for side in sides]
        differs = len(set(values)) > 1
        cells = [(text, "") for text in (name, *values, "differs" if differs else "")]
        rows.append(Row(cells, "differs" if differs else ""))
    return Grid(["", *(arm.name for arm in signoff.arms), ""], rows)


def _data(signoff: Signoff) -> Grid:
    head = ["benchmark", "data", "revision", "items", "dropped on both backends", "SHA-256", "licence"]
    rows = [
        [
            each.title,
            each.name,
            each.revision or words.DASH,
            words.count(each.items),
            words.counted(each.dropped),
            each.sha256,
            each.licence,
        ]
        for each in signoff.data
    ]
    return plain(head, rows, right=(3,))


def _registered(signoff: Signoff) -> list[tuple[str, str]]:
    found = signoff.registered
    if found is None:
        return []
    plan = found.plan
    limited = [("Limit", f"only the first {plan.limit:,} items: a smoke test")] if plan.limit is not None else []
    return [
        ("SHA-256 of plan.json", found.sha256),
        ("Since then", "unchanged" if found.unchanged else "CHANGED: plan.json has another hash now"),
        ("Registered", plan.registered_utc),
        ("First request to the candidate", found.first_candidate_request_utc or "none yet"),
        ("Level of each bound", f"{plan.alpha_pass:g}, one-sided"),
        ("Level of the tests of harm, together", f"{plan.alpha_fail:g}"),
        *limited,
    ]


def _planned(signoff: Signoff) -> Grid:
    head = ["benchmark", "items", "repeats", "seeds", "at once", "margin", "looks at", "sampling"]
    tasks = signoff.registered.plan.tasks if signoff.registered else []
    return plain(head, [_planned_row(each) for each in tasks], right=(1, 2, 3, 4, 5))


def _planned_row(task: TaskPlan) -> list[str]:
    return [
        KINDS[task.task].title,
        words.count(task.data.items),
        words.count(task.repeats),
        f"{task.seed} to {task.seed + task.repeats - 1}",
        words.count(task.concurrency),
        _points(task.margin),
        ", ".join(f"{look:.0%}" for look in task.looks),
        words.settings(task.sampling),
    ]


_COVERAGE = [
    "benchmark", "context", "backend", "share of decode tokens", "tokens judged", "answers", "the rest", "told by",
]  # fmt: skip


def _path(each: ExamPath) -> Row:
    low, high = words.share(each.at_least), words.share(each.at_most)
    bounds = f"{low} to {high}" if words.DASH not in (low, high) and low != high else ""
    return Row(
        [
            (KINDS[each.task].title, ""),
            (each.stratum or "all", ""),
            (each.backend, ""),
            (words.share(each.share), "\n".join(filter(None, [each.counted, bounds]))),
            (words.count(each.tokens), ""),
            (f"{each.answers:,} of {each.of_answers:,}", ""),
            (", ".join(f"{why} {words.share(share)}" for why, share in each.reasons.items()) or words.DASH, ""),
            (each.source, each.note),
        ],
        "first" if not each.stratum else "",
    )


_CONTROLS = ["", "control", "expected", "seen", "n"]


def _control(each: Control) -> Row:
    cells = [(text, "") for text in (_held(each), each.name, each.expected, each.seen, words.count(each.n))]
    return Row(cells, "fail-row" if each.holds is False else "")


_GATES = ["", "gate", "number", "limit", "what was found"]


def _gate(gate: Gate) -> Row:
    limit = f"{gate.limit_is} {_amount(gate.limit, gate.unit)}".strip()
    amounts = [(_amount(gate.number, gate.unit), ""), (limit, "")]
    cells = [(gate.outcome, ""), (gate.title, ""), *amounts, (gate.said, "\n".join(gate.reasons))]
    return Row(cells, "fail-row" if gate.outcome == "FAIL" else "")


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return words.DASH
    match unit:
        case "share":
            return words.share(value)
        case "points":
            return f"{value:z.1f} points"
        case "count":
            return words.count(round(value))
        case _:
            return words.number(value, 4)


def _accuracy(signoff: Signoff) -> Grid:
    names = list(signoff.tasks[0].counts) if signoff.tasks else []
    head = [
        "benchmark",
        "",
        "items × repeats",
        *names,
        "drop, points",
        "at most",
        "margin",
        "smallest Holm p",
        "repeats needed",
    ]
    return Grid(head, [_accuracy_row(each) for each in signoff.tasks], right=tuple(range(2, len(head))))


def _accuracy_row(task: TaskVerdict) -> Row:
    found, planned = task.measured, words.count(task.planned_repeats)
    verdict: list[tuple[str, str]] = [(task.title, ""), (task.outcome, "")]
    mark = "fail-row" if task.outcome == "FAIL" else ""
    if found is None:
        dashes = [(words.DASH, "")] * (len(task.counts) + 2)
        margin = (_bare(task.margin), "")
        return Row([*verdict, (words.DASH, f"{planned} planned"), *dashes, margin, *[(words.DASH, "")] * 2], mark)
    drop = found.drop
    return Row(
        [
            *verdict,
            (f"{found.items:,} × {found.repeats:,}", f"{planned} planned"),
            (words.share(drop.baseline), ""),
            (words.share(drop.candidate), ""),
            (_bare(drop.value), _interval(drop.low, drop.high)),
            (_bare(drop.bound), f"one-sided, {1 - found.level:.2%}"),
            (_bare(task.margin), ""),
            (_p(min((test.holm_p for test in found.tests), default=None)), ""),
            (words.count(found.repeats_needed), ""),
        ],
        mark,
    )


def _points(share: float | None) -> str:
    return f"{_bare(share)} points" if share is not None else words.DASH


def _bare(share: float | None) -> str:
    """Points, where a table's head says so."""
    return f"{share * 100:z.1f}" if share is not None else words.DASH


def _interval(low: float | None, high: float | None) -> str:
    return f"{_bare(low)} to {_bare(high)}" if low is not None and high is not None else "no interval"


def _p(value: float | None) -> str:
    return f"{value:.2g}" if value is not None else words.DASH


def _benchmark(task: TaskVerdict) -> Benchmark:
    grids = [("Answers", _counts(task))]
    found = task.measured
    if found is None:
        return Benchmark(task, [], grids)
    if found.table is not None:
        grids.append(("Pairs of answers to the same question with the same seed", _pairs(task)))
    grids.append(("Tests of harm", _tests(found)))
    if found.bins:
        grids.append(("By context", _strata(task, found.bins)))
    if found.cells:
        grids.append(("By context and more", _strata(task, found.cells)))
    return Benchmark(task, _measured(task, found), grids)


def _measured(task: TaskVerdict, found: Measured) -> list[tuple[str, str]]:
    ended = ", ".join(f"{name} {count:,}" for name, count in task.ended_repeats.items())
    bounds = f"{_points(found.drop.bound_t)} by t, {_points(found.drop.bound_stratified)} by items' variances"
    flips = found.flips
    facts = [
        ("Repeats that ended", f"{ended}; {task.planned_repeats:,} planned, {found.repeats:,} judged"),
        ("Upper bounds of the drop", bounds),
        ("Smallest drop found nine times of ten", _points(found.smallest_drop)),
        ("Variance of a score within its item", words.number(found.within)),
        (
            "Correlation of both backends at equal seeds",
            f"{found.correlation:.2f}" if found.correlation is not None else words.DASH,
        ),
    ]
    if flips is not None:
        said = f"{flips.lost:,} lost, {flips.gained:,} gained; McNemar's exact p {_p(flips.p)}"
        facts.append(("Flips: items mostly right on one backend only", said))
    return facts


def _counts(task: TaskVerdict) -> Grid:
    kinds = Counts.__struct_fields__
    rows = [[name, *(words.count(getattr(of, kind)) for kind in kinds)] for name, of in task.counts.items()]
    return plain(["backend", *kinds], rows, right=tuple(range(1, len(kinds) + 1)))


def _pairs(task: TaskVerdict) -> Grid:
    assert task.measured is not None
    assert task.measured.table is not None
    (baseline, candidate), table = task.counts, task.measured.table
    rows = [
        [f"{baseline} right", words.count(table.both), words.count(table.baseline_only)],
        [f"{baseline} not right", words.count(table.candidate_only), words.count(table.neither)],
    ]
    return plain(["", f"{candidate} right", f"{candidate} not right"], rows, right=(1, 2))


def _tests(found: Measured) -> Grid:
    head = ["test of", "share of the level", "p", "p over all looks", "Holm p, over all benchmarks"]
    rows = [[each.of, words.share(each.share), *map(_p, (each.p, each.overall_p, each.holm_p))] for each in found.tests]
    return plain(head, rows, right=(1, 2, 3, 4))


def _strata(task: TaskVerdict, strata: list[Stratum]) -> Grid:
    head = ["", "items", *task.counts, "drop, points", "at most", "p", "Holm p"]
    rows = [
        Row(
            [
                (each.name.removeprefix("bin "), ""),
                (words.count(each.items), ""),
                (words.share(each.drop.baseline), ""),
                (words.share(each.drop.candidate), ""),
                (_bare(each.drop.value), _interval(each.drop.low, each.drop.high)),
                (_bare(each.drop.bound), ""),
                (_p(each.p), ""),
                (_p(each.holm_p), ""),
            ]
        )
        for each in strata
    ]
    return Grid(head, rows, right=tuple(range(1, len(head))))

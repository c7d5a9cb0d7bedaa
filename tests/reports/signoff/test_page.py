"""The sign-off document as HTML and Markdown."""

from __future__ import annotations

import html as entities
import re
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser

import msgspec
import pytest

from reports.signoff.charts import by_context, forest
from reports.signoff.page import html, markdown, missing
from reports.signoff.result import Gate, Signoff
from tests.reports.signoff.documents import BASELINE, CANDIDATE, failing, mrcr, passing, without_evals

DOCUMENTS = [passing, failing, without_evals]
of_each = pytest.mark.parametrize("made", DOCUMENTS, ids=lambda made: made.__name__)
Made = Callable[[], Signoff]


@cache
def page_of(made: Made) -> str:
    """HTML, drawn once for all tests."""
    return html(made())


class _Page(HTMLParser):
    """What a browser would load from elsewhere, links and ids, text outside of styles and charts, and tables as lists
    of rows of cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.tables: list[list[list[str]]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key == "href" and (value or "").startswith("#"):
                self.links.append(str(value)[1:])
            elif key in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.loads.append(f"{tag} {key}={value}")
            elif key == "id":
                self.ids.append(str(value))
        if tag in ("link", "script", "iframe", "img", "object", "form"):
            self.loads.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Closed at once."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open or "svg" in self.open:
            return
        self.text += f" {data}"
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += f" {data}"


def _figures(text: str) -> list[str]:
    return re.findall(r"-?\d[\d.,:TZ-]*\d|\d", text)


def _tables(text: str) -> list[list[list[str]]]:
    """Of Markdown, without the lines below heads."""
    blocks = [block.strip("\n").split("\n") for block in text.split("\n\n") if block.strip("\n").startswith("|")]
    return [
        [re.split(r"(?<!\\)\|", line)[1:-1] for number, line in enumerate(block) if number != 1] for block in blocks
    ]


@of_each
def test_html_needs_nothing_else(made: Made) -> None:
    page = page_of(made)
    parsed = _Page(page)
    assert parsed.loads == []
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert set(parsed.links) <= set(parsed.ids)
    assert {"gates", "controls", "decode-path"} <= set(parsed.links)
    assert "@import" not in page
    assert "url(http" not in page
    assert "://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert "://" not in markdown(made())


@of_each
def test_the_same_document_gives_the_same_bytes(made: Made) -> None:
    assert html(made()) == page_of(made)
    assert markdown(made()) == markdown(made())


@of_each
def test_nothing_is_shown_as_the_language_has_it(made: Made) -> None:
    for text in (_Page(page_of(made)).text, markdown(made())):
        assert not re.search(r"\b(None|nan|inf|True|False)\b|\w+\(\w+=", text)


@of_each
def test_both_forms_have_the_same_figures(made: Made) -> None:
    page = _Page(page_of(made))
    told = _tables(markdown(made()))
    glance = told.pop(0)  # a list of definitions in HTML
    for _, text in glance[1:]:
        assert _figures(text) != [] or "nothing is known" in text
        assert " ".join(text.split()) in " ".join(page.text.split())
    assert len(page.tables) == len(told) > 0
    for one, other in zip(page.tables, told, strict=True):
        assert [[_figures(cell) for cell in row] for row in one] == [[_figures(cell) for cell in row] for row in other]


@of_each
def test_markdown_tables_have_equal_columns(made: Made) -> None:
    for table in _tables(markdown(made())):
        assert len({len(row) for row in table}) == 1


@of_each
def test_the_verdict_comes_first_then_why_then_what_it_does_not_cover(made: Made) -> None:
    found = made()
    headings = [
        "Why", "What is missing", "What this does not cover", "At a glance", "Scope", "Arms and model", "Data",
        "Plan as registered", "Decode path in the benchmarks", "Controls", "Gates", "Accuracy", "Deviations",
        "Reproduction", "Roll-out", "Inputs",
    ]  # fmt: skip
    told, page = markdown(found), page_of(made)
    in_text = [told.index(f"{title}\n\n", told.index("## ")) for title in headings]
    in_page = [page.index(f"{title}</h") for title in headings]
    assert in_text == sorted(in_text)
    assert in_page == sorted(in_page)
    assert told.splitlines()[0].endswith(f"{found.outcome}: {found.name}")
    assert f"**{found.line}**" in told[: in_text[0]]
    colour = {"PASS": "pass", "FAIL": "fail", "INCONCLUSIVE": "unknown"}[found.outcome]
    assert f'<div class="outcome {colour}">{found.outcome}<' in page[: in_page[0]]


@of_each
def test_every_section_is_stamped(made: Made) -> None:
    found = made()
    page, told = page_of(made), markdown(found)
    headings = [line for line in told.splitlines() if line.startswith("#")]
    emulated = bool(found.stamps)
    assert page.count('<span class="tag">EMULATED</span>') == (page.count("<h2") if emulated else 0)
    assert page.count("<h2") > 10
    assert all(("[EMULATED]" in line) == emulated for line in headings)
    assert ('class="stamp"' in page) == emulated


def _spiked(found: Signoff) -> tuple[Signoff, list[str]]:
    """The document with markup in whatever others wrote, and all of it."""
    told: list[str] = []

    def spike(text: str) -> str:
        told.append(f'{text} <script>"{len(told)}" | & b')
        return told[-1]

    replace = msgspec.structs.replace
    changed = replace(
        found,
        line=f"{found.outcome}: {spike('line')}",
        name=spike("name"),
        measured_by=spike("who"),
        reasons=[spike(each) for each in found.reasons],
        scope=[replace(each, value=spike(each.value)) for each in found.scope],
        not_covered=[spike(each) for each in found.not_covered],
        parts=[replace(each, summary=spike(each.summary)) for each in found.parts],
        arms=[
            replace(
                arm,
                decode_backend=spike(arm.decode_backend),
                facts={name: spike(value) for name, value in arm.facts.items()},
            )
            for arm in found.arms
        ],
        differences=[replace(each, candidate=spike(each.candidate or "")) for each in found.differences],
        unverified=[spike(each) for each in found.unverified],
        data=[replace(each, name=spike(each.name), licence=spike(each.licence)) for each in found.data],
        coverage=[replace(each, counted=spike(each.counted), note=spike(each.note)) for each in found.coverage],
        controls=[
            replace(each, name=spike(each.name), expected=spike(each.expected), seen=spike(each.seen))
            for each in found.controls
        ],
        gates=[
            replace(
                each,
                title=spike(each.title),
                said=spike(each.said),
                reasons=[spike(reason) for reason in each.reasons],
            )
            for each in found.gates
        ],
        tasks=[replace(each, reasons=[spike(reason) for reason in each.reasons]) for each in found.tasks],
        speed=[replace(each, value=spike(each.value)) for each in found.speed],
        deviations=[spike(each) for each in found.deviations],
        reproduction=[replace(each, value=spike(each.value)) for each in found.reproduction],
        rollout=[spike(each) for each in found.rollout],
        inputs={spike(name): value for name, value in found.inputs.items()},
    )
    return changed, told


@of_each
def test_everything_is_shown_and_escaped(made: Made) -> None:
    found, told = _spiked(made())
    page, text = html(found), markdown(found)
    assert "<script" not in page
    assert "<script" not in text
    shown = entities.unescape(page)
    for each in told:
        assert each in shown
        assert each.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|") in text
    for each in missing(found):
        assert each in shown


def test_what_is_missing_is_said_once() -> None:
    open_gates = [
        Gate(id=name, title=name, outcome="INCONCLUSIVE", said="", reasons=reasons)
        for name, reasons in [("Speed", ["Nothing is known.", "Run it."]), ("Path", ["Nothing is known."])]
    ]
    found = msgspec.structs.replace(
        passing(), outcome="INCONCLUSIVE", gates=open_gates, reasons=["Speed: Run it"], controls=[]
    )
    assert missing(found) == ["Speed, Path: Nothing is known."]
    assert missing(passing()) == []
    assert missing(without_evals()) == ["Control that was not run: A1 against A2"]


def test_figures_stand_in_their_units() -> None:
    text = " ".join(markdown(passing()).split())
    # gates: shares of 1, points as they are
    assert "| PASS | Specialised path in every benchmark and bin | 92.0% | 90.0% |" in text
    assert "| PASS | AIME25: drop within the margin | 2.1 points | 3.0 points |" in text
    assert "| PASS | One deployment | 0 | 0 |" in text
    assert "| PASS | Plan registered first | – | – |" in text
    # 0.9615 and a drop of 0.0031, interval 0.0196 to each side, bound 0.9 of it
    row = "| AIME25 | PASS | 30 × 32 (32 planned) | 96.2% | 95.8% | 0.3 (-1.7 to 2.3) | 2.1 (one-sided, 95.00%) | 3.0 |"
    assert f"{row} 0.93 | 27 |" in text
    assert f"| {BASELINE} right | 905 | 18 | | {BASELINE} not right | 15 | 22 |" in text
    assert f"| {CANDIDATE} | 920 | 29 | 5 | 6 | 0 | 3 |" in text
    assert "1 lost, 0 gained; McNemar's exact p 1" in text
    assert "-0.0" not in text


def test_unknown_is_a_dash_and_no_number() -> None:
    text = markdown(failing())
    unknown = next(line for line in text.splitlines() if line.startswith(f"| GPQA-Diamond | all | {CANDIDATE} "))
    assert unknown.startswith(f"| GPQA-Diamond | all | {CANDIDATE} | – | – | 0 of 960 | – | none (")
    assert "| GPQA-Diamond | INCONCLUSIVE | – (16 planned) | – | – | – | – | 2.0 | – | – |" in text
    assert "| not run | Faults are found | each fault is seen | not run | – |" in text


def test_facts_that_differ_are_marked() -> None:
    page, text = page_of(passing), markdown(passing())
    assert "| Decode backend | auto | latency_specialized | differs |" in text
    assert "| Model | moonshotai/Kimi-K3 | moonshotai/Kimi-K3 |  |" in text
    assert page.count('<tr class="differs">') == text.count("| differs |") == 3


def test_a_plan_that_was_changed_is_shown() -> None:
    found = passing()
    assert found.registered is not None
    assert "Since then: unchanged" in markdown(found)
    changed = msgspec.structs.replace(
        found, registered=msgspec.structs.replace(found.registered, unchanged=False, first_candidate_request_utc=None)
    )
    assert "Since then: CHANGED" in markdown(changed)
    assert "First request to the candidate: none yet" in markdown(changed)


def test_charts_where_there_are_figures() -> None:
    assert page_of(passing).count("<svg ") == 3
    assert page_of(without_evals).count("<svg ") == 0
    assert forest([each for each in failing().tasks if each.measured is None]) is None
    assert by_context(failing().tasks[0], [BASELINE, CANDIDATE]) == []
    needles = page_of(passing)
    assert all(f">{count} needles<" in needles for count in (2, 4, 8))
    task = mrcr()
    assert task.measured is not None
    plain = msgspec.structs.replace(task, measured=msgspec.structs.replace(task.measured, cells=[]))
    page = html(msgspec.structs.replace(passing(), tasks=[plain]))
    assert page.count("<svg ") == 3
    assert "needles<" not in page[page.index("<svg") :]


def test_items_without_an_interval_are_drawn_without() -> None:
    task = mrcr()
    assert task.measured is not None
    bare = msgspec.structs.replace(task.measured.drop, low=None, high=None, bound=None, bound_t=None)
    found = msgspec.structs.replace(
        passing(), tasks=[msgspec.structs.replace(task, measured=msgspec.structs.replace(task.measured, drop=bare))]
    )
    assert "0.1 (no interval)" in markdown(found)
    page = html(found)
    assert page.count("<svg ") == 3
    assert "NaN" not in page


def test_inputs_are_folded_on_screen_and_printed() -> None:
    page = page_of(passing)
    assert '<summary>32 files</summary></details>\n<div class="folded">' in page
    printed = page[page.index("@media print") :]
    assert "details:not([open]) + .folded { display: block; }" in printed

"""The checks of the battery, as they are judged, in the order of the document. To add one, write its file and list it
here."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from reports.parity.arms import Arms
from reports.parity.checks import d1, d2, d3, d4, d5, d6, d7, l1, l2, p1, p2, p3, p4, p5, p6, p7, s1, v1, v2, v3, v4
from reports.parity.result import Family, Seen


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One check. ``asks``: arms have records of its own. ``instead``: checks, all of which have to pass in its place
    where it could not be run; none: what it looks at is then not covered; null: there is no PASS without it."""

    id: str
    title: str
    family: Family
    judge: Callable[[Arms], Seen]
    asks: bool = True
    instead: tuple[str, ...] | None = None


CHECKS = [
    Judged(id="V1", title="Configuration", family="validity", judge=v1.judge, asks=False),
    Judged(id="V2", title="Decode path", family="validity", judge=v2.judge, asks=False),
    Judged(id="V3", title="The same prompts", family="validity", judge=v3.judge, asks=False),
    Judged(id="V4", title="Hygiene", family="validity", judge=v4.judge, asks=False),
    Judged(id="D1", title="Streams", family="replies", judge=d1.judge),
    Judged(id="D2", title="Lengths and stops", family="replies", judge=d2.judge),
    Judged(id="D3", title="Sampler calibration", family="replies", judge=d3.judge),
    Judged(id="D4", title="Seeds and neighbours", family="replies", judge=d4.judge),
    Judged(id="D5", title="Cold and warm prefix", family="replies", judge=d5.judge),
    Judged(id="D6", title="Tool calls", family="replies", judge=d6.judge, instead=()),
    Judged(id="D7", title="Garbage", family="replies", judge=d7.judge),
    Judged(id="P1", title="Trace replay", family="tokens", judge=p1.judge, instead=("P3", "P4")),
    Judged(id="P3", title="First divergence", family="tokens", judge=p3.judge),
    Judged(id="P4", title="Cut points", family="tokens", judge=p4.judge),
    Judged(id="P5", title="Contexts", family="tokens", judge=p5.judge),
    Judged(id="P6", title="Batches and churn", family="tokens", judge=p6.judge),
    Judged(id="P7", title="Soak", family="tokens", judge=p7.judge, instead=("P3", "P4")),
    Judged(id="P2", title="Outliers", family="tokens", judge=p2.judge, asks=False),
    Judged(id="S1", title="Acceptance of drafts", family="speculation", judge=s1.judge, instead=()),
    Judged(id="L1", title="Lengths of replies", family="lengths", judge=l1.judge),
    Judged(id="L2", title="Repetition", family="lengths", judge=l2.judge),
]
"""P2 takes together what those before it compared. F1, flips, is judged with the evals (reports.accuracy)."""

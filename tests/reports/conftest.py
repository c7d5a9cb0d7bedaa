"""Fewer replicates than in a report, for speed; tests of intervals themselves choose their own number."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from reports import analysis
from reports.intervals import resample


@pytest.fixture(autouse=True, scope="package")
def _fewer_replicates() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis, "resample", functools.partial(resample, replicates=400))
        yield

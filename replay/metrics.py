"""A server's /metrics: one full reading at each edge of a block, and its gauges now and then between.

Read from a thread of the process that measures nothing: parsing a page holds the interpreter for milliseconds, which in
a client worker would delay stamps.
"""

from __future__ import annotations

import http.client
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from replay.records import MetricsSample

_PREFIX = "vllm:"
_TIMEOUT_S = 5.0
"""For connecting, and for each wait for bytes."""
_MOST_BYTES = 64 << 20

Sample = tuple[str, dict[str, str], float]
"""(name, labels, value)"""


def parse(text: str, *, gauges: bool = False) -> list[Sample]:
    """The samples of a page whose names start with "vllm:", in its order; with ``gauges`` only those of gauges.

    Left out: buckets of histograms, the times at which counters were made, values that are no number, and between the
    edges (``gauges``) the "_info" gauges, which never change. Raises ValueError for text of another format.
    """
    lines = [line for line in text.split("\n") if line.startswith(_WANTED) and "_bucket{" not in line]
    if text.strip() and not lines and not text.lstrip().startswith("#"):
        raise ValueError(f"not a page of metrics: {text.strip()[:60]!r}")
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families("\n".join([*lines, ""]))
        if not gauges or (family.type == "gauge" and not family.name.endswith("_info"))
        for sample in family.samples
        if not sample.name.endswith("_created") and math.isfinite(sample.value)
    ]


_WANTED = (_PREFIX, f"# TYPE {_PREFIX}")


class Scraper:
    """Appends readings of the server at ``url`` to ``file``, a MetricsSample a line: one at each edge of a block, and
    between them one each ``interval_s``. What goes wrong is said in the sample; nothing is raised.

    A context manager: leaving it ends the thread, also in a block that never came to its end edge.
    """

    def __init__(self, url: str, headers: Mapping[str, str], file: Path, interval_s: float) -> None:
        self._request = urllib.request.Request(
            url.rstrip("/").removesuffix("/v1") + "/metrics", headers={"Accept": "text/plain", **headers}
        )
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect)
        self._file = file
        self._interval_s = interval_s
        self._missing = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._between, name="metrics", daemon=True)

    def __enter__(self) -> Scraper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_edge(self) -> None:
        """Read everything, then go on reading gauges: after the warm-up, right before the window opens."""
        self._append("start")
        self._thread.start()

    def end_edge(self) -> None:
        """Read everything for the last time: after the last reply."""
        self.close()
        self._append("end")

    def close(self) -> None:
        """Stop reading. Nothing happens if that is done."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _between(self) -> None:
        while not self._missing and not self._stop.wait(self._interval_s):
            self._append("between")

    def _append(self, at: Literal["start", "between", "end"]) -> None:
        if self._missing:  # said once
            return
        sample = MetricsSample(t_ns=time.monotonic_ns(), at=at)
        try:
            sample.samples = parse(self._page(), gauges=at == "between")
        except urllib.error.HTTPError as error:
            self._missing = error.code == 404
            sample.error = f"http {error.code}"
            error.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            sample.error = f"{type(error).__name__}: {error}"[:300]
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(sample) + b"\n")

    def _page(self) -> str:
        with self._opener.open(self._request, timeout=_TIMEOUT_S) as response:
            page: bytes = response.read(_MOST_BYTES)
        return page.decode("utf-8", "replace")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Headers may hold a token, which is for nobody else."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> None:
        return None

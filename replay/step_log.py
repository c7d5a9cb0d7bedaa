"""The step log: a vLLM stat-logger plugin that writes one small record a step, from which path coverage is judged.

It runs inside vLLM's API server process (0.26 to 0.33), so this one file uses the standard library only, and can be
copied there (replay/step_plugin.py). It does nothing unless DECODEGATE_STEPS names a folder (on a local disk, and
empty: a log is never written over). There it writes, for each engine, ENGINE-PID.json and ENGINE-PID.bin, laid out as
StepLog and STEP of replay/records.py, each record in one write. Whatever goes wrong switches it off, with one line in
the server's log; it never reaches the server.

What a record holds, and how far it can be trusted:

* All of it is of one step, with async scheduling too: vLLM's scheduler makes its statistics from the same model output
  as the tokens, CUDA-graph mode and sizes included, and the API server hands both to us together. The exceptions are
  ``running``, ``waiting`` and ``kv_use``: they are read when the step's output is processed, and async scheduling has
  scheduled the next step by then.
* first_tokens + decode_tokens, summed, are the completion tokens of all requests, exactly: vLLM's own count of tokens
  handed to requests. A first output carries one token, since drafts are verified in decode steps only. A request that
  was preempted and computed again goes on with decode tokens.
* prompt_tokens is what was scheduled (unpadded) less what decoding took: one for each output that was not a first one,
  and the drafts that it verified. So a chunk in the middle of a prefill shows, in the step that computed it, although
  vLLM's iteration statistics tell of a prompt only when its prefill ends; recomputing a preempted request shows as well
  (one token short). Two things of no account look the same. With async scheduling a request that ended in the step
  before has been scheduled once more, for nothing: where that explains all of it, prompt_tokens is 0. A request that
  its client gave up in that step, or whose drafts a grammar refused, is not told apart.
* Without --cudagraph-metrics unpadded, padded, mode and prompt_tokens are unknown, and steps that gave no token (chunks
  of prefill alone) leave no record. With it, a call without tokens and without a size is no step, and leaves none.
* With several API servers each writes a log of the tokens of its own requests, and the rest of a step goes to one of
  them: there the parts of a step cannot be put together. Serve with --api-server-count 1 for coverage.
"""

from __future__ import annotations

import json
import logging
import math
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

STEP = struct.Struct("<q10ifi")
"""records.STEP"""

MODES = {"NONE": 1, "PIECEWISE": 2, "FULL": 3}
"""Index into records.STEP_MODES; 0 is unknown."""

_log = logging.getLogger("vllm.decodegate")  # below "vllm", so that the line gets into the server's log


class Steps:
    """All of the plugin but its base class, which only vLLM has: ``StepLog`` is both."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.file: int | None = None
        self.ended = 0
        """Requests that ended in the last record, or since."""
        self.rows_after_end = 0
        """Tokens that a request may be scheduled for in the step after its last."""
        folder = os.environ.get("DECODEGATE_STEPS")
        if not folder:
            return
        try:
            head = _head(vllm_config, engine_index)
            scheduling = getattr(vllm_config, "scheduler_config", None)
            if getattr(scheduling, "async_scheduling", False):
                self.rows_after_end = 1 + head["draft_tokens"]
            path = Path(folder) / f"{engine_index}-{os.getpid()}"
            path.parent.mkdir(parents=True, exist_ok=True)
            # Exclusive: if the plugin is loaded twice in a process, the second copy fails here and stays off.
            self.file = os.open(f"{path}.bin", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(head))
            part.replace(f"{path}.json")
        except Exception as error:
            self._off(error)
        else:
            _log.info("decodegate: step log of engine %d in %s.bin", engine_index, path)

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Called by vLLM with the statistics of a step, either of which may be None."""
        if self.file is None:
            return
        try:
            values = self._step(scheduler_stats, iteration_stats)
            if values is not None and os.write(self.file, STEP.pack(time.monotonic_ns(), *values)) != STEP.size:
                raise OSError("the disk is full")
        except Exception as error:
            self._off(error)

    def log_engine_initialized(self) -> None:
        """Nothing to do: the head is written with the first line of the log."""

    def _step(self, scheduler: Any, iteration: Any) -> tuple[int | float, ...] | None:
        """The record's fields after its time; None if this was no step."""
        tokens = firsts = decoding = ended = 0
        if iteration is not None:
            tokens = iteration.num_generation_tokens
            # An output without a token (of a request that failed in its prefill) is in the list too.
            firsts = min(len(iteration.time_to_first_tokens_iter), tokens)
            decoding = len(iteration.inter_token_latencies_iter)
            ended = len(iteration.finished_requests)
        graph = getattr(scheduler, "cudagraph_stats", None)
        if graph is None and not tokens:
            self.ended += ended
            return None
        running = waiting = prompt = unpadded = padded = draft_requests = draft_tokens = accepted = -1
        kv_use = math.nan
        mode = 0
        if scheduler is not None:
            running = scheduler.num_running_reqs
            waiting = scheduler.num_waiting_reqs + getattr(scheduler, "num_skipped_waiting_reqs", 0)
            kv_use = getattr(scheduler, "kv_cache_usage", math.nan)
            drafts = getattr(scheduler, "spec_decoding_stats", None)
            draft_requests = getattr(drafts, "num_drafts", 0)
            draft_tokens = getattr(drafts, "num_draft_tokens", 0)
            accepted = getattr(drafts, "num_accepted_tokens", 0)
        if graph is not None:
            unpadded, padded = graph.num_unpadded_tokens, graph.num_padded_tokens
            mode = MODES.get(graph.runtime_mode.rpartition(".")[2], 0)
            prompt = max(unpadded - decoding - draft_tokens, 0)
            if not firsts and prompt <= self.ended * self.rows_after_end:
                prompt = 0
        self.ended = ended
        return (
            running, waiting, prompt, firsts, tokens - firsts, unpadded, padded,
            draft_requests, draft_tokens, accepted, kv_use, mode,
        )  # fmt: skip

    def _off(self, error: Exception) -> None:
        file, self.file = self.file, None
        _log.warning("decodegate: the step log is off: %s: %s", type(error).__name__, error)
        if file is not None:
            os.close(file)


def _head(config: Any, engine: int) -> dict[str, Any]:
    """records.StepLog. The configuration is the API server's: what the engine changed for itself while it started (a
    CUDA-graph mode that its attention backend cannot do, for one) is not seen here."""
    compilation = getattr(config, "compilation_config", None)
    additional = getattr(config, "additional_config", None)
    backend = additional.get("decode_backend") if isinstance(additional, dict) else None
    mode = getattr(compilation, "cudagraph_mode", None)
    return {
        "schema_version": 1,
        "engine": engine,
        "pid": os.getpid(),
        "started_ns": time.monotonic_ns(),
        "started_unix_s": time.time(),
        "vllm_version": getattr(sys.modules.get("vllm"), "__version__", "unknown"),
        "cudagraph_mode": getattr(mode, "name", None),
        "capture_sizes": list(getattr(compilation, "cudagraph_capture_sizes", None) or []),
        "cudagraph_metrics": bool(getattr(getattr(config, "observability_config", None), "cudagraph_metrics", False)),
        "draft_tokens": getattr(getattr(config, "speculative_config", None), "num_speculative_tokens", None) or 0,
        "decode_backend": None if backend is None else str(backend),
    }


def __getattr__(name: str) -> Any:
    """``StepLog``, made when it is first asked for, since vLLM's base class is nowhere else."""
    if name != "StepLog":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from vllm.v1.metrics.loggers import StatLoggerBase
    except ImportError as error:
        raise ImportError(f"{__name__}.StepLog is a plugin that vLLM loads: no vLLM in this environment") from error

    class StepLog(Steps, StatLoggerBase):  # type: ignore[misc]
        """The entry point."""

    globals()["StepLog"] = StepLog
    return StepLog

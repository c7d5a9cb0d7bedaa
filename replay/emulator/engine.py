"""The step loop: runs the scheduler's steps against the clock and hands out their tokens.

The schedule does not drift: a step is due at the due time of the one before plus its own length, however late that
one's tokens went out. A loop that is late catches up step by step, one step in each turn of the event loop, so that
chunks never merge. Only when it is later than ``HOPELESS_NS`` (a machine that was suspended, or is far too slow) is the
schedule moved to now, and the step log says by how much.
"""

from __future__ import annotations

import asyncio
import time

from replay.emulator.alarm import Alarm
from replay.emulator.scheduler import Scheduler, Sequence, Step
from replay.emulator.settings import EmulatorSettings
from replay.emulator.truth import StepRun, TruthLog

HOPELESS_NS = 250_000_000
RUN_NS = 500_000_000  # a run of steps in the log is closed after this long, so that little is lost at a kill


class Engine:
    """An emulated engine on the running event loop."""

    def __init__(self, settings: EmulatorSettings, truth: TruthLog) -> None:
        self.scheduler = Scheduler(settings)
        self._truth = truth
        self._ns_per_s = 1e9 / settings.time_scale
        self._ns_per_minute = 60 * self._ns_per_s
        self._alarm = Alarm(asyncio.get_running_loop(), self._due)
        self._born_ns = time.monotonic_ns()
        self._step: Step | None = None
        self._start_ns = 0
        self._due_ns = 0
        self._run: StepRun | None = None

    def submit(self, sequence: Sequence) -> None:
        """Queue a request; its ``deliver`` is called with its tokens, from the event loop."""
        sequence.queued_ns = now = time.monotonic_ns()
        self.scheduler.add(sequence)
        if self._step is None:
            self._begin(now)

    def abort(self, sequence: Sequence) -> None:
        """Drop a request whose client has left."""
        self.scheduler.abort(sequence)

    def close(self) -> None:
        """Stop stepping and log what ran."""
        self._alarm.close()
        self._log_run()

    def _begin(self, start_ns: int) -> None:
        self._step = step = self.scheduler.begin((start_ns - self._born_ns) / self._ns_per_minute)
        if step is None:
            self._log_run()
            return
        if step.prompt_tokens:
            for sequence, _, of_prompt in step.parts:
                if of_prompt and not sequence.scheduled_ns:
                    sequence.scheduled_ns = max(start_ns, sequence.queued_ns)  # a late step began before it came
        self._start_ns = start_ns
        self._due_ns = start_ns + round(step.seconds * self._ns_per_s)
        self._alarm.set(self._due_ns)

    def _due(self) -> None:
        step, now = self._step, time.monotonic_ns()
        if step is None:
            return
        late = now - self._due_ns
        if late < 0:
            self._alarm.set(self._due_ns)
            return
        for sequence, tokens in self.scheduler.end(step):
            if sequence.deliver is not None:
                sequence.deliver(tokens)
        lost = late if late > HOPELESS_NS else 0
        self._note(step, late, lost)
        self._begin(self._due_ns + lost)

    def _note(self, step: Step, late: int, lost: int) -> None:
        run, route, rows = self._run, step.route, len(step.parts)
        if (
            run is not None
            and not step.prompt_tokens
            and not run.prompt_tokens
            and (run.rows, run.specialised, run.reason) == (rows, route.specialised, route.reason)
            and run.end_ns == self._start_ns
            and run.end_ns - run.t_ns < RUN_NS
        ):
            run.end_ns = self._due_ns
            run.steps += 1
            run.decode_tokens += step.decode_tokens
            run.late_ns = max(run.late_ns, late)
            run.lost_ns += lost
            return
        self._log_run()
        self._run = StepRun(
            t_ns=self._start_ns,
            end_ns=self._due_ns,
            steps=1,
            rows=rows,
            prompt_tokens=step.prompt_tokens,
            decode_tokens=step.decode_tokens,
            specialised=route.specialised,
            reason=route.reason,
            late_ns=late,
            lost_ns=lost,
        )

    def _log_run(self) -> None:
        if self._run is not None:
            self._truth.steps(self._run)
            self._run = None

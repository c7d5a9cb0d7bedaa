"""Sending one turn: over the wire, decoded after its end, recorded whatever became of it."""

from __future__ import annotations

from collections.abc import Mapping

from replay.lanes import Ended, Outgoing
from replay.outcomes import CountTokens, Outcome, outcome_sliced
from replay.recorder import Recorder
from replay.records import Phase, RequestRecord
from replay.wire import Exchange, Wire
from workloads.errors import UserError
from workloads.rendering import PATHS, Rendering

_UNREACHABLE = 10
"""Connections refused or timed out in a row, none made in between, after which the server counts as gone."""


class ServerGone(UserError):
    """Nothing answers at the server's address any more."""


class Sender:
    """Sends turns of one block over one wire. ``last_end_ns``: end of the last measured reply, 0 before the first."""

    def __init__(
        self, wire: Wire, rendering: Rendering, recorder: Recorder, count_tokens: CountTokens | None = None
    ) -> None:
        self.last_end_ns = 0
        self._unreachable = 0
        self._wire = wire
        self._recorder = recorder
        self._count_tokens = count_tokens
        self._rendering = rendering
        self._path = PATHS[rendering.api]

    async def send(self, outgoing: Outgoing) -> Ended:
        """Send a measured turn. What the server or the network does to it is recorded, not raised.

        Raises ServerGone once the server is gone: failing through the rest of the plan would only take time, and a
        block that is cut off here can be measured again with --resume.
        """
        record = await self.record(outgoing, "measured")
        self.last_end_ns = max(self.last_end_ns, record.end_ns)
        return Ended(record.end_ns, record.status == "ok")

    async def record(self, outgoing: Outgoing, phase: Phase) -> RequestRecord:
        """Send one turn of either phase, and append its record."""
        request_id = request_name(outgoing, phase)
        exchange = await self._wire.exchange(self._path, outgoing.body, _headers(outgoing, request_id))
        outcome = await outcome_sliced(
            exchange,
            api=self._rendering.api,
            asked_output=outgoing.turn.output_tokens,
            exact_length=self._rendering.length_control != "none",
            limits=self._wire.limits,
            count_tokens=self._count_tokens,
        )
        record = _record(outgoing, request_id, phase, exchange, outcome)
        self._recorder.request(record, outcome.chunks)
        self._unreachable = self._unreachable + 1 if exchange.failure == "no connection" else 0
        if self._unreachable >= _UNREACHABLE:
            raise ServerGone(
                f"{self._wire.url}: {_UNREACHABLE} connections in a row failed ({exchange.detail}): the server is gone."
                " What was measured is kept; bring it back and continue with --resume"
            )
        return record


def request_name(outgoing: Outgoing, phase: Phase) -> str:
    """Unique inside a block; sent as X-Request-ID."""
    name = f"{outgoing.session.id}.{outgoing.play.number}.{outgoing.stream}.{outgoing.number}"
    return name if phase == "measured" else f"warmup.{name}"


def _headers(outgoing: Outgoing, request_id: str) -> Mapping[str, str]:
    """One id for the whole tree, so that a router can keep it together, and one for the stream."""
    tree = f"{outgoing.session.id}.{outgoing.play.number}"
    return {"X-Request-ID": request_id, "X-Session-ID": tree, "X-Stream-ID": f"{tree}.{outgoing.stream}"}


def _record(outgoing: Outgoing, request_id: str, phase: Phase, exchange: Exchange, outcome: Outcome) -> RequestRecord:
    return RequestRecord(
        request_id=request_id,
        session=outgoing.session.id,
        play=outgoing.play.number,
        stream=outgoing.stream,
        turn=outgoing.number,
        lane=outgoing.lane,
        phase=phase,
        prompt_digest=outgoing.digest,
        asked_input=outgoing.turn.input_tokens,
        asked_output=outgoing.turn.output_tokens,
        ideal_cached=outgoing.turn.ideal_cached,
        due_ns=outgoing.due_ns,
        sent_ns=exchange.sent_ns,
        pool_wait_ns=exchange.pool_wait_ns + outgoing.waited_ns,
        connect_ns=exchange.connect_ns,
        first_byte_ns=exchange.first_byte_ns,
        first_token_ns=outcome.first_token_ns,
        first_answer_ns=outcome.first_answer_ns,
        last_token_ns=outcome.last_token_ns,
        end_ns=exchange.end_ns,
        status=outcome.status,
        error=outcome.error,
        detail=outcome.detail,
        http_status=exchange.http_status,
        finish_reason=outcome.finish_reason,
        input_tokens=outcome.input_tokens,
        output_tokens=outcome.output_tokens,
        output_tokens_client=outcome.output_tokens_client,
        cached_tokens=outcome.cached_tokens,
        reasoning_tokens=outcome.reasoning_tokens,
        first_chunk_tokens=outcome.first_chunk_tokens,
        token_source=outcome.token_source,
        attempts=exchange.attempts,
        reset_retries=exchange.reset_retries,
        throttle_retries=exchange.throttle_retries,
        streamed=outcome.streamed,
        zero_output=outgoing.turn.zero_output,
        server_fingerprint=outcome.server_fingerprint,
        server_first_token_s=outcome.server_first_token_s,
        server_queue_s=outcome.server_queue_s,
        server_itl_s=outcome.server_itl_s,
        notes=outcome.notes,
    )

"""What is asked of the server, as the proxy reads it, and the faults that lie in how it is asked. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from replay.emulator.noise import unit

Api = Literal["completions", "chat", "generate"]

APIS: dict[str, Api] = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/inference/v1/generate": "generate",
}
"""The paths on which tokens are made."""

BLOCK_TOKENS = 16
BLOCK_BYTES = 64
"""How much of a prompt must repeat for a prefix hit to be taken for granted: ids, or bytes where there are no ids."""
COMPLETION_TOKENS = 16
"""vLLM's limit for /v1/completions where none is asked for."""
SHARED_SEED = 1234


class Asked(msgspec.Struct):
    """One request. ``body`` is what goes to the server: faults change it in place."""

    api: Api
    body: dict[str, Any]
    key: int
    """64 bits from the fault's seed, the request's bytes and how often they came before: all draws depend on it."""
    warm: bool = False
    """An earlier prompt began with the same block."""
    shortened: bool = False
    """Its limit of tokens is ours, not the client's."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Where the sampling fields stand."""
        sampling: dict[str, Any] = self.body["sampling_params"] if self.api == "generate" else self.body
        return sampling

    @property
    def streamed(self) -> bool:
        """A stream of events is asked for."""
        return bool(self.body.get("stream"))

    @property
    def forced(self) -> bool:
        """Trace replay: the ids are given, whatever the logits are."""
        return bool(self.sampling.get("trace_decode_token_ids"))

    @property
    def prompts(self) -> list[Any]:
        """Of /v1/completions a text or ids each; of a chat its messages; else ids."""
        if self.api != "completions":
            return [self.body.get("messages" if self.api == "chat" else "token_ids") or []]
        prompt = self.body.get("prompt") or ""
        if isinstance(prompt, list) and not isinstance(prompt[0], int):
            return prompt
        return [prompt]

    @property
    def rows(self) -> int:
        """Replies that it takes: rows of the server's batch."""
        return len(self.prompts) * int(self.sampling.get("n") or 1)

    @property
    def prompt_tokens(self) -> int | None:
        """Where ids were sent."""
        first = self.prompts[0]
        ids = isinstance(first, list) and bool(first) and isinstance(first[0], int)
        return len(first) if ids and len(self.prompts) == 1 else None

    @property
    def first_block(self) -> bytes | None:
        """The first block of its prompt, with its salt; None for a prompt that is shorter."""
        first = self.prompts[0]
        if self.prompt_tokens is None:
            text = first.encode() if isinstance(first, str) else msgspec.json.encode(first)
            block = text[:BLOCK_BYTES] if len(text) > BLOCK_BYTES else None
        else:
            block = msgspec.json.encode(first[:BLOCK_TOKENS]) if len(first) > BLOCK_TOKENS else None
        return block and msgspec.json.encode(self.body.get("cache_salt")) + block


def asked(api: Api, body: bytes, key: int) -> Asked | None:
    """Read a request; None for one that the server is going to refuse."""
    try:
        request = Asked(api, msgspec.json.decode(body, type=dict), key)
        return request if request.rows and isinstance(request.sampling, dict) else None
    except (msgspec.DecodeError, LookupError, TypeError, ValueError):
        return None


Ask = Callable[[Asked, float], None]
"""A fault in asking: changes the request, given the fault's number."""


def ignore_temperature(request: Asked, number: float) -> None:
    """Greedy, whatever was asked for. vLLM refuses temperature 0 for several replies, but not the best one of one."""
    single = int(request.sampling.get("n") or 1) == 1
    request.sampling.update({"temperature": 0.0} if single else {"top_k": 1})


def ignore_top_p(request: Asked, number: float) -> None:
    """The whole vocabulary, whatever was asked for."""
    request.sampling["top_p"] = 1.0


def ignore_seed(request: Asked, number: float) -> None:
    """A seed of the server's own."""
    request.sampling.pop("seed", None)


def share_seed(request: Asked, number: float) -> None:
    """One seed for all."""
    request.sampling["seed"] = SHARED_SEED


def truncate(request: Asked, number: float) -> None:
    """The server's own limit: it ends with finish reason "length" and the right usage, as a wrong limit would."""
    _limit(request, int(number))


def stop_early(request: Asked, number: float) -> None:
    """Each token ends the reply with chance 1/``number``, where it may end: a second EOS, so to say."""
    if not request.forced and not request.sampling.get("ignore_eos"):
        more = 1 + math.floor(-math.log(1 - unit(request.key, 1)) * number)
        request.shortened = _limit(request, int(request.sampling.get("min_tokens") or 0) + more)


def _limit(request: Asked, limit: int) -> bool:
    """Let the reply end after ``limit`` tokens; False if it was to end by then anyway."""
    sampling = request.sampling
    newer = request.api == "chat" and sampling.get("max_completion_tokens") is not None
    name = "max_completion_tokens" if newer else "max_tokens"
    own = sampling.get(name) or (COMPLETION_TOKENS if request.api == "completions" else None)
    if own is not None and own <= limit:
        return False
    sampling[name] = limit
    if (sampling.get("min_tokens") or 0) > limit:
        sampling["min_tokens"] = limit
    return True

"""What checks have in common: how a case is asked, and how what came is put on record."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from evals.parity.check import Given, Situation
from evals.parity.endpoint import TOP, Ask, Chat, ChatReply, Generation
from evals.parity.prompts import digest
from evals.parity.questions import question
from evals.records import Case, ParityReply
from workloads.content import stable_bytes

SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
"""As in production."""


def drawn(situation: Situation, *what: object) -> int:
    """A number of 31 bits for a purpose: the seed of a prompt or of a request."""
    return int.from_bytes(stable_bytes("parity", situation.seed, *what)[:4], "little") >> 1


def width(situation: Situation, most: int) -> int:
    """How many requests may decode together, ``most`` at most: no more than the specialised path takes, since beyond
    them the other path runs."""
    limits = (most, situation.max_requests, situation.specialised_requests or most)
    return max(1, min(limits))


def lots(count: int, size: int) -> Iterator[range]:
    """The numbers below ``count``, ``size`` at a time."""
    return (range(start, min(start + size, count)) for start in range(0, count, size))


def groups(cases: Sequence[Case]) -> Iterator[Sequence[Case]]:
    """Cases in order, cut where they are to be sent: each batch by itself."""
    start = 0
    while start < len(cases):
        end = start + cases[start].batch
        yield cases[start:end]
        start = end


def case(situation: Situation, check: str, number: int, prompt: int, tokens: tuple[int, int], **other: Any) -> Case:
    """A case of a check: the check's prompt number ``prompt``, sampled as in production with a seed of that prompt.
    ``tokens``: of the prompt (0: in words) and of the longest reply, which max_context cuts; ``other``: fields of Case.

    The digest of a prompt of ids is left open: whoever makes the prompt fills it in.
    """
    prompt_tokens, output_tokens = tokens
    plain = Case(
        number=number,
        prompt_seed=drawn(situation, check, prompt),
        prompt_tokens=prompt_tokens,
        prompt_digest="",
        output_tokens=min(output_tokens, situation.max_context - (prompt_tokens or situation.max_context // 2)),
        seed=drawn(situation, check, prompt, "seed"),
        **SAMPLED,
    )
    made = replace(plain, **other)
    return made if prompt_tokens else replace(made, prompt_digest=words_digest(chat(made)))


def ask(given: Given, case: Case, salt: object, **other: Any) -> Ask:
    """A case as a request. ``salt``: requests of one prompt and salt share what the prefix cache holds, others nothing;
    ``other``: fields of Ask that are not the case's."""
    plain = Ask(
        prompt=given.prompts(case),
        max_tokens=case.output_tokens,
        temperature=case.temperature,
        top_p=case.top_p,
        seed=case.seed,
        salt=_short(f"{given.salt}/{case.prompt_seed}/{salt}".encode()),  # vLLM takes 128 characters, some not
    )
    return replace(plain, **other)


def chat(case: Case) -> Chat:
    """A case in words: an invented question. How many tokens that is the server knows."""
    return Chat(
        body={
            "messages": [{"role": "user", "content": question(case.prompt_seed)}],
            "max_tokens": case.output_tokens,
            "temperature": case.temperature,
            "top_p": case.top_p,
            "seed": case.seed,
        }
    )


async def answers(given: Given, group: Sequence[Case], **other: Any) -> list[Generation]:
    """What comes for cases that are all in ids (``other``: as in ``ask``), or all in words."""
    if not group[0].prompt_tokens:
        return [of_chat(reply) for reply in await given.endpoint.chat([chat(each) for each in group])]
    asks = [ask(given, each, each.variant, **other) for each in group]
    return [generation for (generation,) in await given.endpoint.generate(asks)]


def words_digest(chat: Chat) -> str:
    """16 hex digits over a request in words."""
    return _short(msgspec.json.encode(chat.body))


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def record(given: Given, case: Case, generation: Generation, *, repeat: int = 0, **facts: Any) -> None:
    """Append what came for a case. ``facts``: fields of ParityReply that the generation does not have."""
    given.sink.reply(
        ParityReply(
            case=case.number,
            repeat=repeat,
            ids=generation.ids.size,
            ids_hash=digest(generation.ids.tolist()),
            completion_tokens=generation.completion_tokens,
            finish_reason=generation.finish_reason,
            cached_tokens=generation.cached_tokens,
            error=generation.error,
            fingerprint=generation.fingerprint,
            sent_unix_s=generation.sent_unix_s,
            ended_unix_s=generation.ended_unix_s,
            **facts,
        )
    )
    if generation.error is None:
        given.sink.tokens(case.number, generation, repeat=repeat)


def of_chat(reply: ChatReply) -> Generation:
    """A chat's reply as a generation without logprobs. Its text begins with the thoughts; its ids, where they are told,
    are those of all that was said."""
    return Generation(
        ids=np.array(reply.ids or [], np.int32),
        logprobs=np.empty(0, np.float32),
        top_ids=np.empty((0, TOP), np.int32),
        top_logprobs=np.empty((0, TOP), np.float32),
        finish_reason=reply.finish_reason,
        completion_tokens=reply.completion_tokens,
        text="".join(each or "" for each in (reply.reasoning, reply.text)),
        fingerprint=reply.fingerprint,
        error=reply.error,
    )


def miscounted(generation: Generation) -> str | None:
    """How the usage differs from the ids that came."""
    told, came = generation.completion_tokens, generation.ids.size
    return None if told in (None, came) or generation.error else f"usage counts {told} tokens, {came} came"

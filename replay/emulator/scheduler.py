"""Continuous batching, without clock or network: which tokens each step computes, how long it takes, what it yields.

As in vLLM's scheduler each step first serves the running requests (one token, or one verify of drafts, or the next
piece of a prompt), then admits waiting ones in order of arrival while token budget, rows and KV blocks last. Unlike
vLLM's it admits a request only when its whole prompt and reply fit, so that nothing is ever preempted.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Tokens

import numpy as np
from numpy.typing import NDArray

from replay.emulator import decoding, faults, language, speculation, speech
from replay.emulator.eligibility import Route, route
from replay.emulator.prefix_cache import ROOT, PrefixCache, block_hash, block_hashes
from replay.emulator.profiles import Profile, step_time
from replay.emulator.settings import EmulatorSettings, resolve
from replay.emulator.speech import Voice
from replay.emulator.truth import Finish


class Sequence:
    """One request on its way through the scheduler."""

    __slots__ = (
        "answer_from",
        "at_once",
        "block_start",
        "cached",
        "computed",
        "decode_steps",
        "deliver",
        "finish",
        "hashes",
        "held",
        "last",
        "limit",
        "limit_finish",
        "may_end",
        "min_tokens",
        "output",
        "private",
        "prompt",
        "queued_ns",
        "salt",
        "scheduled_ns",
        "script",
        "seed",
        "specialised_tokens",
        "stop_ids",
        "stop_reason",
        "stops",
        "tail",
        "text_tail",
        "voice",
    )

    def __init__(
        self,
        prompt: NDArray[np.int32],
        *,
        limit: int,
        deliver: Callable[[list[int]], None] | None = None,
        limit_finish: Finish = "length",
        min_tokens: int = 0,
        may_end: bool = False,
        seed: int = 0,
        stops: tuple[str, ...] = (),
        stop_ids: frozenset[int] = frozenset(),
        answer_from: int = 0,
        script: Tokens[int] = (),
        at_once: int = 1,
        voice: Voice | None = None,
        salt: bytes = ROOT,
    ) -> None:
        """``limit``: output tokens at which it ends, with ``limit_finish``. ``may_end``: the language may end the reply
        earlier, after ``min_tokens``. ``answer_from``: output tokens before this one are thought, and stop strings are
        looked for after them. ``script``: what it says, down to the limit or the end of the text; empty: what the
        language does. ``at_once``: tokens that come with the end of the prompt. ``voice``: the language
        model speaks instead. ``salt``: cached prefixes are shared with requests of the same one only. ``deliver`` is
        called with the tokens of each step that yields some."""
        self.prompt = prompt
        self.limit = limit
        self.limit_finish = limit_finish
        self.min_tokens = min_tokens
        self.may_end = may_end
        self.seed = seed
        self.stops = stops
        self.stop_ids = stop_ids
        self.answer_from = answer_from
        self.script = script
        self.at_once = at_once
        self.voice = voice
        self.salt = salt
        self.deliver = deliver
        self.finish: Finish | None = None
        self.stop_reason: str | None = None
        self.queued_ns = 0  # this and the next are the engine's, which has a clock
        self.scheduled_ns = 0  # start of the first step that computes some of it
        self.cached: int | None = None  # prompt tokens found in the cache, once admitted
        self.computed = 0  # prompt tokens whose KV is there
        self.output = 0
        self.decode_steps = 0
        self.specialised_tokens = 0
        self.last = _last_three(prompt)
        self.hashes: list[bytes] = []  # of the prompt's full blocks
        self.held: list[bytes] = []  # blocks of ours that others may share
        self.private = 0  # blocks of ours that are not full
        self.tail: list[int] = []  # tokens after the last full block
        self.text_tail = ""  # end of the answer, long enough to hold a stop string

    @property
    def context(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.prompt) + self.output


def _last_three(prompt: NDArray[np.int32]) -> tuple[int, int, int]:
    a, b, c = ([0, 0, 0, *prompt[-3:].tolist()])[-3:]
    return a, b, c


class Step:
    """One forward pass under way."""

    __slots__ = ("decode_tokens", "parts", "prompt_tokens", "route", "seconds", "verify")

    def __init__(self) -> None:
        self.parts: list[tuple[Sequence, int, bool]] = []  # (request, tokens it computes, whether of its prompt)
        self.prompt_tokens = 0
        self.verify: list[int] = []  # tokens of each decoding request
        self.decode_tokens = 0  # yielded by decoding requests, known when the step ends
        self.route = Route(False, 0, "")
        self.seconds = 0.0


class Counts:
    """Totals since the start, as /metrics shows them."""

    def __init__(self, draft_tokens: int) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cache_queries = 0
        self.cache_hits = 0
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_per_position = [0] * draft_tokens
        self.finished: Counter[str] = Counter()
        self.steps = 0
        self.specialised_steps = 0


class Scheduler:
    """The state of one emulated engine. ``begin`` composes a step, ``end`` completes it."""

    def __init__(self, settings: EmulatorSettings) -> None:
        self.profile: Profile = resolve(settings)
        self.decode_backend = settings.decode_backend
        self.drafts = settings.speculation.draft_tokens if settings.speculation else 0
        self.accepted = speculation.schedule(settings.speculation, settings.seed)
        self.faults = faults.parse(settings.faults)
        self.weights = settings.seed
        self.faulty = decoding.Faulty(
            {name: number for name, number in self.faults.items() if name in faults.DECODE_FAULTS}, settings.noise_seed
        )
        self.batch: list[Sequence] = []  # the decoding rows of the last step in which the model spoke
        self.standard = step_time(self.profile, "auto")
        self.specialised = step_time(self.profile, "latency_specialized")
        self.cache = PrefixCache(self.profile.kv_blocks)
        self.caching = "no-cache" not in self.faults
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counts = Counts(self.drafts)

    def add(self, sequence: Sequence) -> None:
        """Queue a request. Its prompt and limit fit ``max_model_len``."""
        size = self.profile.block_size
        if self.caching:
            sequence.hashes = block_hashes(sequence.prompt, size, sequence.salt)
        sequence.tail = sequence.prompt[len(sequence.prompt) // size * size :].tolist()
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Take a request out, wherever it is; nothing happens if it has ended or never came."""
        if sequence in self.running:
            self._finish(sequence, "abort")
            self._leave(sequence)
        elif sequence in self.waiting:
            self._finish(sequence, "abort")
            self.waiting.remove(sequence)

    def begin(self, emulated_minutes: float = 0.0) -> Step | None:
        """Compose the next step; None if there is nothing to do. ``emulated_minutes`` since the start serve drift."""
        profile = self.profile
        budget = profile.max_num_batched_tokens
        step = Step()
        long_context = 0
        for sequence in self.running:
            if budget <= 0:
                break
            if sequence.computed < len(sequence.prompt):
                budget -= self._prefill(step, sequence, budget)
                continue
            context = sequence.context
            count = min(1 + self.drafts, profile.max_model_len - context, budget)
            step.verify.append(count)
            step.parts.append((sequence, count, False))
            budget -= count
            if context > profile.context_free_tokens:
                long_context += context - profile.context_free_tokens
        while self.waiting and budget > 0 and len(self.running) < profile.max_num_seqs:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            self.running.append(self.waiting.popleft())
            budget -= self._prefill(step, sequence, budget)
        if not step.parts:
            return None
        prompt_rows = len(step.parts) - len(step.verify)
        step.route = route(self.decode_backend, step.verify, prompt_rows, profile.captured_sizes)
        step.seconds = self._seconds(step, long_context) * self._slowness(emulated_minutes)
        return step

    def end(self, step: Step) -> list[tuple[Sequence, list[int]]]:
        """Complete a step: (request, its new tokens) of each that yields some. Aborted ones yield nothing."""
        counts = self.counts
        counts.steps += 1
        counts.specialised_steps += step.route.specialised
        counts.prompt_tokens += step.prompt_tokens
        turns = []  # (request, tokens it is to yield, whether of its prompt)
        for sequence, count, of_prompt in step.parts:
            if sequence.finish is not None or sequence.computed < len(sequence.prompt):
                continue
            wanted = sequence.at_once  # the end of a prompt gives the first token
            if not of_prompt:
                wanted = min(self.accepted(sequence.decode_steps, sequence.context), count)
                sequence.decode_steps += 1
                if count > 1:
                    counts.drafts += 1
                    counts.draft_tokens += count - 1
                    for position in range(wanted - 1):
                        counts.accepted_per_position[position] += 1
            turns.append((sequence, wanted, of_prompt))
        said = self._say(step, turns)
        yields = []
        for sequence, wanted, of_prompt in turns:
            tokens = said[sequence] if sequence.voice is not None else self._generate(sequence, wanted)
            self._settle(sequence, tokens)
            if not of_prompt:
                step.decode_tokens += len(tokens)
                if step.route.specialised:
                    sequence.specialised_tokens += len(tokens)
            counts.generation_tokens += len(tokens)
            yields.append((sequence, tokens))
        return yields

    def reset_cache(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while requests use it."""
        if self.running:
            return False
        self.cache.reset()
        return True

    def _seconds(self, step: Step, long_context: int) -> float:
        profile, verify = self.profile, max(step.verify, default=1)
        times = self.specialised if step.route.specialised else self.standard
        seconds = times.seconds(max(step.route.tokens, verify), verify) + long_context * profile.context_s_per_token
        if step.prompt_tokens:
            seconds += step.prompt_tokens / profile.prefill_tokens_per_s + profile.prompt_step_overhead_s
        return seconds

    def _slowness(self, emulated_minutes: float) -> float:
        drift = self.faults.get("drift", 0.0) / 100 * emulated_minutes
        return self.faults.get("slow", 1.0) * max(1 + drift, 0.01)

    def _admit(self, sequence: Sequence) -> bool:
        size, length = self.profile.block_size, len(sequence.prompt)
        hits = min(self.cache.hits(sequence.hashes), (length - 1) // size)  # the last token must run to yield the next
        fresh = -(-(length + sequence.limit) // size) - hits
        if not self.cache.allocate(sequence.hashes[:hits], fresh):
            return False
        if self.caching:
            self.counts.cache_queries += length
            self.counts.cache_hits += hits * size
        sequence.cached = sequence.computed = hits * size
        if sequence.voice is not None:
            sequence.voice.cached = sequence.cached
        sequence.held = sequence.hashes[:hits]
        sequence.private = fresh
        return True

    def _prefill(self, step: Step, sequence: Sequence, budget: int) -> int:
        count = min(len(sequence.prompt) - sequence.computed, budget)
        sequence.computed += count
        step.prompt_tokens += count
        step.parts.append((sequence, count, True))
        # Shared from the moment it is scheduled, as in vLLM: later requests of the same step may build on it.
        for block in sequence.hashes[len(sequence.held) : sequence.computed // self.profile.block_size]:
            self._publish(sequence, block)
        return count

    def _publish(self, sequence: Sequence, block: bytes) -> None:
        self.cache.publish(block)
        sequence.held.append(block)
        sequence.private -= 1

    def _generate(self, sequence: Sequence, wanted: int) -> list[int]:
        return self._recite(sequence, wanted) if sequence.script else self._speak(sequence, wanted)

    def _settle(self, sequence: Sequence, tokens: list[int]) -> None:
        """Make room for what a request was given, and let it go if that was its end."""
        if self.caching:
            size = self.profile.block_size
            sequence.tail.extend(tokens)
            full = (len(sequence.tail) - 1) // size * size  # the newest token is not computed yet, so it fills no block
            for start in range(0, full, size):
                parent = sequence.held[-1] if sequence.held else sequence.salt
                block = array("i", sequence.tail[start : start + size])
                self._publish(sequence, block_hash(parent, block.tobytes()))
            del sequence.tail[:full]
        if sequence.finish is not None:
            self._leave(sequence)

    def _say(self, step: Step, turns: list[tuple[Sequence, int, bool]]) -> dict[Sequence, list[int]]:
        """Let the model speak for all of a step's requests that have a voice: what it says for each."""
        said: dict[Sequence, list[int]] = {sequence: [] for sequence, _, _ in turns if sequence.voice is not None}
        if not said:
            return said
        batch = [sequence for sequence, _, of_prompt in step.parts if not of_prompt]
        rows = {sequence: row for row, sequence in enumerate(batch)}
        joined, self.batch = batch != self.batch, batch
        speaking = [(sequence, sequence.voice, wanted) for sequence, wanted, _ in turns if sequence.voice is not None]
        while speaking:
            place = decoding.Place(
                step=self.counts.steps,
                row=np.array([rows.get(sequence, 0) for sequence, _, _ in speaking]),
                batch=max(len(batch), 1),
                joined=joined,
            )
            tokens = speech.say([voice for _, voice, _ in speaking], place, self.faulty, self.weights)
            for (sequence, _, _), token in zip(speaking, tokens, strict=True):
                said[sequence].append(token)
                self._count(sequence, token)
            speaking = [turn for turn in speaking if turn[0].finish is None and len(said[turn[0]]) < turn[2]]
        return said

    def _recite(self, sequence: Sequence, wanted: int) -> list[int]:
        start = sequence.output
        tokens = list(sequence.script[start : min(start + wanted, sequence.limit)])
        sequence.output += len(tokens)
        if tokens[-1] == language.EOS:
            self._finish(sequence, "stop")
        elif sequence.output >= sequence.limit:
            self._finish(sequence, sequence.limit_finish)
        return tokens

    def _speak(self, sequence: Sequence, wanted: int) -> list[int]:
        tokens = []
        for _ in range(wanted):
            may_end = sequence.may_end and sequence.output >= sequence.min_tokens
            token = language.next_token(sequence.last, sequence.context, sequence.seed, may_end)
            sequence.last = (sequence.last[1], sequence.last[2], token)
            tokens.append(token)
            self._count(sequence, token)
            if sequence.finish is not None:
                break
        return tokens

    def _count(self, sequence: Sequence, token: int) -> None:
        """Count one output token, and end the request if that is the last."""
        sequence.output += 1
        ended = token == language.EOS and sequence.may_end
        ended = ended or (token in sequence.stop_ids and sequence.output > sequence.min_tokens)
        if ended or (sequence.stops and self._stopped(sequence, token)):
            self._finish(sequence, "stop")
        elif sequence.output >= sequence.limit:
            self._finish(sequence, sequence.limit_finish)

    def _stopped(self, sequence: Sequence, token: int) -> bool:
        if sequence.output <= max(sequence.answer_from, sequence.min_tokens):
            return False
        text = sequence.text_tail + (language.TOKENS[token] if token >= language.FIRST_CHARACTER else "")
        sequence.stop_reason = next((stop for stop in sequence.stops if stop in text), None)
        sequence.text_tail = text[-max(map(len, sequence.stops)) :]
        return sequence.stop_reason is not None

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        sequence.finish = finish
        self.counts.finished[finish] += 1

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.cache.release(sequence.held, sequence.private)
        sequence.held = []
        sequence.private = 0

"""The experiment file: one YAML file that describes a comparison. Unknown keys are errors."""

from __future__ import annotations

import difflib
import json
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from replay import presets, redaction
from workloads.errors import UserError


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _plain_types(cls, data: Any) -> Any:
        """YAML knows numbers from texts and yes from 1; a slip must not be taken for what it is not."""
        if not isinstance(data, dict):
            return data
        for name, field in cls.model_fields.items():
            value, wanted = data.get(name), str(field.annotation)
            number = ("int" in wanted or "float" in wanted) and "Literal" not in wanted and "dict" not in wanted
            if number and isinstance(value, (bool, str)):
                raise ValueError(f"{name}: {value!r} is not a number")
            if "bool" in wanted and not isinstance(value, bool | None):
                raise ValueError(f"{name}: {value!r} is neither true nor false")
        return data


class Synthetic(_Model):
    """A generated workload: the settings of decodegate workload generate that matter most here."""

    sessions: int = Field(24, ge=1)
    """Number of sessions."""
    seed: int = 1
    """Same seed, same sessions, on every platform."""
    max_turns: int | None = Field(None, ge=3)
    """Longest stream, in turns."""
    input_scale: float = Field(1.0, gt=0)
    """Multiplies prompt lengths."""
    output_scale: float = Field(1.0, gt=0)
    """Multiplies output lengths."""
    pause_scale: float = Field(1.0, gt=0)
    """Multiplies pauses."""
    subagent_share: float = Field(0.1, ge=0, le=1)
    """Share of sessions with subagents."""


class Workload(_Model):
    """What to send."""

    path: Path | None = None
    """Recorded sessions: a folder, a .json or a .jsonl file. Relative to the experiment file."""
    format: str | None = None
    """Trace format; detected when left out."""
    synthetic: Synthetic | None = None
    """Generated sessions instead of recorded ones."""
    demo: bool = False
    """The small workload that comes with decodegate."""
    sessions: int | None = Field(None, ge=1)
    """Take only the first so many sessions (in the seeded order)."""
    max_turns: int | None = Field(None, ge=1)
    """Cut each stream after so many turns, counted from the recording's first."""
    max_context: int | None = Field(None, ge=1)
    """Largest prompt + output, tokens. Left out: the smaller max_model_len of the two backends, if they tell."""
    over_context: Literal["cut", "drop", "skip"] = "cut"
    """What happens to a stream at its first turn over max_context. cut: it ends there. drop: the whole session is left
    out. skip: only turns over the limit are left out."""
    max_output: int | None = Field(None, ge=1)
    """Cap on the output tokens of a turn."""

    @model_validator(mode="after")
    def _one_source(self) -> Workload:
        if sum([self.path is not None, self.synthetic is not None, self.demo]) != 1:
            raise ValueError("give exactly one of path, synthetic, demo")
        return self


class Warmup(_Model):
    """Before each block's clock starts. Its prompts share nothing with measured ones, except that a session which
    starts in mid-recording has its own prefix sent."""

    requests: int = Field(8, ge=0)
    """Small unrelated requests that bring the server up to speed."""
    seconds: float = Field(120.0, gt=0)
    """Budget for the whole warm-up; what is not done by then is left out and reported."""


class Limits(_Model):
    """When a request is given up, seconds."""

    connect_s: float = Field(10, gt=0)
    """Longest time to open a connection."""
    first_byte_s: float = Field(600, gt=0)
    """Longest wait for the first byte (a long prefill is silent)."""
    idle_s: float = Field(120, gt=0)
    """Longest silence after that."""
    total_s: float | None = Field(None, gt=0)
    """Longest time for a whole reply; none by default."""
    keep_alive_s: float = Field(4, gt=0)
    """Idle connections are dropped after this: keep it below the server's own limit (vLLM: 5 s)."""
    throttle_retries: int = Field(5, ge=0)
    """How often a 429 or 503 that carries Retry-After is tried again. 0: it fails at once."""
    throttle_wait_s: float = Field(60, gt=0)
    """Longest Retry-After that is honoured; the wait counts in the latency."""


class Replay(_Model):
    """How the workload is played."""

    lanes: int = Field(8, ge=1, le=100_000)
    """Simulated users. Each holds one session tree at a time; subagents add requests without using a lane."""
    seed: int = 1
    """Order of sessions, start points, salts, content."""
    mode: Literal["closed", "open"] = "closed"
    """closed: a turn follows the live end of what it waits for, after its pause. open: turns are sent at their recorded
    times, whatever the server does; latency counts from the scheduled time."""
    end: Literal["work", "duration"] = "work"
    """work: every block sends exactly the same turns (pairs are exact). duration: a block lasts duration_s, lanes start
    over when their sessions run out (comparable with the reference benchmark)."""
    duration_s: float | None = Field(None, gt=0)
    """With end duration: length of the measured window. With end work: an upper limit, none by default."""
    drain_s: float = Field(30, ge=0)
    """After the window ends nothing new is sent; requests in flight get so long before they are cut."""
    pause_cap_s: float | None = Field(None, ge=0)
    """Closed loop: longest pause that is kept, for every pause alike. Left out: all pauses as recorded."""
    idle_cap_s: float | None = Field(None, ge=0)
    """Open loop: stretches in which no session is active are shortened to this. Left out: nothing is."""
    max_in_flight: int | None = Field(None, ge=1)
    """Open loop: most requests in flight; later ones wait (their wait counts in the latency)."""
    start: tuple[float, float] = (0.0, 0.0)
    """Each lane's first session starts at a turn drawn evenly from this share of its main agent's turns."""
    salt: str | None = None
    """Any text; with seed, block and session it makes the salt that keeps prompts of different blocks out of each
    other's cache. Left out: a fresh one for every run, so that a server may still hold an earlier run. Name the one
    in an earlier run's manifest.json to send that run's exact bytes again."""
    ramp_s: float = Field(1.0, ge=0)
    """Lanes start spread over so many seconds, not all in one instant."""
    on_failure: Literal["continue", "end_session"] = "continue"
    """After a failed turn: go on with the recorded next one, or give the session up (its other turns: not reached)."""
    rounds: int = Field(1, ge=1, le=1000)
    """How often the balanced order of four blocks is repeated."""
    order: Literal["ABBA", "AB"] = "ABBA"
    """Order of blocks in a round. ABBA (or BAAB, drawn by the seed) balances drift. AB is quicker and cannot tell drift
    from effect: its report is inconclusive."""
    workers: int = Field(1, ge=1, le=256)
    """Client processes; lanes are dealt out over them."""
    warmup: Warmup = Warmup()
    """See Warmup."""
    limits: Limits = Limits()
    """See Limits."""

    @model_validator(mode="after")
    def _consistent(self) -> Replay:
        if self.end == "duration" and self.duration_s is None:
            raise ValueError("end: duration needs duration_s")
        if not 0 <= self.start[0] <= self.start[1] < 1:
            raise ValueError("start must be [low, high] with 0 <= low <= high < 1")
        if self.mode == "open" and (self.end == "duration" or self.start != (0.0, 0.0)):
            raise ValueError("mode: open plays whole recordings: use end: work and leave start out")
        if self.mode == "open" and self.pause_cap_s is not None:
            raise ValueError("pause_cap_s belongs to mode: closed; in open mode use idle_cap_s")
        if self.mode == "closed" and (self.idle_cap_s is not None or self.max_in_flight is not None):
            raise ValueError("idle_cap_s and max_in_flight belong to mode: open; in closed mode use pause_cap_s, lanes")
        return self


class Gpus(_Model):
    """GPUs that serve one backend."""

    count: int = Field(ge=1)
    """How many."""
    kind: str
    """What they are, for instance GB300."""
    layout: dict[str, int] = {}
    """Parallel layout, for instance {tp: 8, dcp: 8}."""


class Emulator(_Model):
    """Use the embedded emulator as this backend. Its figures are not measurements of hardware and are stamped so."""

    profile: str = "toy"
    """A name from: decodegate emulate --help."""
    draft_tokens: int = Field(0, ge=0)
    """Speculative draft tokens a step; 0: no speculation."""
    acceptance_length: float | None = Field(None, ge=1)
    """Tokens committed a step with speculation, on average."""
    acceptance_rates: list[Annotated[float, Field(ge=0, le=1)]] | None = None
    """With speculation, instead: the share of steps that accept the draft token at each position."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest context, tokens; by default the profile's."""
    time_scale: float = Field(1.0, gt=0)
    """How many times faster than the emulated hardware time runs. Pauses shrink with it; the report's times are those
    of the emulated hardware."""
    faults: list[str] = []
    """Named faults to switch on: decodegate emulate --help."""
    exams: Path | None = None
    """A JSON file of questions that it answers right with given probabilities: replay/emulator/exams.py."""
    language: Literal["words", "model"] = "words"
    """What answers requests that want no logprobs: quick words, or the language model that answers those that do.
    decodegate parity always takes the model."""
    noise_seed: int = 0
    """Of numerical noise, of what faults of the decode path strike, and of luck in exams. Another one: another run of
    the same server."""
    scale_out: bool = True
    """Offer /inference/v1/generate, as vLLM does with --enable-scale-out."""
    trace_replay: bool = True
    """Take trace_decode_token_ids there, as vLLM does with --enable-trace-replay."""
    seed: int | None = Field(None, ge=0)
    """Of its words, its language model and random acceptance; by default replay.seed, so that both backends say the
    same."""


class Serve(_Model):
    """Start a server for this backend, and stop it."""

    command: list[str] | str
    """The words of a vllm serve command, as a list or as one text: [vllm, serve, /models/kimi-k3]."""
    options: dict[str, Any] = {}
    """Further options by name: a value becomes --name value, true --name, false --no-name, a map JSON, a list several
    words."""
    env: dict[str, str] = {}
    """Environment added to decodegate's own; ${NAME} is taken from it."""
    devices: list[Annotated[int, Field(ge=0, strict=True)]] | None = None
    """GPUs by index, as CUDA_VISIBLE_DEVICES. Left out: what the environment says."""
    host: str = "127.0.0.1"
    """Address of this host that the server listens on."""
    port: int | None = Field(None, ge=1, le=65535)
    """Left out: a free one."""
    ready_s: float = Field(7200, gt=0)
    """Longest time until its first token: a checkpoint of 1.5 TB takes its time."""
    stop_s: float = Field(60, gt=0)
    """Time to end by itself before it is killed."""
    instrument: bool = True
    """Add what shows the decode path and the server's own times: decodegate's step log (a vLLM plugin),
    --cudagraph-metrics, --enable-prompt-tokens-details, --enable-per-request-metrics. Off for servers that do not know
    these."""


class Backend(_Model):
    """One backend: a running server (url), one that is started for the comparison (serve), or the embedded emulator."""

    url: str | None = None
    """Base URL of a running server, without /v1."""
    serve: Serve | None = None
    """See Serve."""
    emulator: Emulator | None = None
    """See Emulator."""
    decode_backend: Literal["auto", "latency_specialized"] = "auto"
    """vLLM's additional_config.decode_backend of this server: with url as you started it, with serve it is added to the
    command."""
    model: str | None = None
    """Model name as served here, if it differs from the experiment's."""
    headers: dict[str, str] = {}
    """Extra request headers, for instance {Authorization: "Bearer ${TOKEN}"}: ${NAME} is taken from the environment.
    Values are kept out of the run directory."""
    steps: Path | None = None
    """With url: the folder into which this server writes its step log (its DECODEGATE_STEPS), as this host sees it."""
    gpus: Gpus | None = None
    """GPUs that serve it."""
    price_per_gpu_hour: float | None = Field(None, gt=0)
    """For cost per million output tokens, in whatever currency."""

    @model_validator(mode="after")
    def _one_server(self) -> Backend:
        if sum(each is not None for each in (self.url, self.serve, self.emulator)) != 1:
            raise ValueError("give exactly one of url, serve, emulator")
        if self.steps is not None and self.url is None:
            raise ValueError("steps is for url: of servers that decodegate starts it knows where the step log is")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError("url must start with http:// or https://")
        return self

    @model_validator(mode="after")
    def _gpus_fit(self) -> Backend:
        devices = self.serve.devices if self.serve is not None else None
        if devices is not None and len(set(devices)) < len(devices):
            raise ValueError("serve.devices names a GPU twice")
        if devices is not None and self.gpus is not None and len(devices) != self.gpus.count:
            raise ValueError(f"serve.devices names {len(devices)} GPUs, but gpus.count is {self.gpus.count}")
        if self.price_per_gpu_hour is not None and self.gpus is None:
            raise ValueError("price_per_gpu_hour needs gpus: a cost is that of so many GPUs")
        return self


class Backends(_Model):
    """The two under comparison."""

    both: dict[str, Any] = {}
    """Keys of both backends, so that a deployment is described once; what a backend says itself goes over it."""
    baseline: Backend
    """The backend in use today (decode_backend: auto)."""
    candidate: Backend
    """The backend under test (decode_backend: latency_specialized)."""

    @model_validator(mode="before")
    @classmethod
    def _share(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("both"), dict):
            return data
        own = {name: value for name, value in data.items() if name != "both"}
        return own | {name: _over(data["both"], own.get(name) or {}) for name in ("baseline", "candidate")}


def _over(common: Any, own: Any) -> Any:
    """``own`` over ``common``: maps key by key, anything else as a whole."""
    if isinstance(common, dict) and isinstance(own, dict):
        return common | {name: _over(common.get(name), value) for name, value in own.items()}
    return own


class Serving(_Model):
    """How servers that decodegate starts take their turns, and what both servers are checked for."""

    arrangement: Literal["in_turn", "side_by_side"] = "in_turn"
    """in_turn: one server at a time, both on the same GPUs. side_by_side: both are up all the time, on GPUs of their
    own; blocks still run one at a time."""
    blocks_per_start: int = Field(1, ge=1)
    """In turn: blocks measured on each start of a server, one after another. More cost fewer restarts, but what one
    start has by chance is then in all of them."""
    under_test: list[str] = ["additional-config.decode_backend"]
    """Settings of the servers that are meant to differ, like speculative-config or compilation-config.cudagraph_mode; a
    name covers what is below it. Any other difference is refused."""
    start_up_control: bool = True
    """Start the candidate once with a decode_backend that does not exist: a server that takes it ignores the key, and
    would run standard decode as the candidate."""
    metrics_interval_s: float = Field(10, gt=0)
    """How often a server's /metrics is read during a block, besides its edges."""


def _distinct(sizes: list[int]) -> list[int]:
    if twice := [size for number, size in enumerate(sizes) if size in sizes[:number]]:
        raise ValueError(f"{twice[0]} stands twice: name each size once (repeats says how often it is measured)")
    return sizes


_Sizes = Annotated[list[Annotated[int, Field(ge=1, strict=True)]], Field(min_length=1), AfterValidator(_distinct)]


class Speculating(_Model):
    """One speculative setting of both servers, for decode tables. ``none`` stands for no speculation."""

    draft_tokens: int = Field(0, ge=0)
    """Draft tokens a step (vLLM: num_speculative_tokens). 0: no speculation."""
    method: str | None = None
    """For instance dspark or ngram."""
    model: str | None = None
    """The drafter's folder or name, for methods that need one."""
    acceptance_length: float | None = Field(None, ge=1)
    """Synthetic acceptance: tokens that a step commits on average, drafts and one, whatever the target says. Left out:
    drafts are really verified."""
    acceptance_rates: list[Annotated[float, Field(ge=0, le=1)]] | None = None
    """Synthetic acceptance by position instead: one rate for each draft token, none above the one before."""
    options: dict[str, Any] = {}
    """Further keys of vLLM's --speculative-config."""
    batch: _Sizes | None = None
    """Batch sizes for this setting, instead of decode.batch."""

    @model_validator(mode="before")
    @classmethod
    def _none(cls, data: Any) -> Any:
        return {} if data == "none" else data

    @model_validator(mode="after")
    def _fits(self) -> Speculating:
        if not self.draft_tokens:
            own = self.model_dump(exclude={"batch"}, exclude_defaults=True)  # a frozen file has every default
            given = own.keys() - {"draft_tokens"}
            if given:
                raise ValueError(f"{min(given)} needs draft_tokens")
            return self
        if self.acceptance_length is not None and self.acceptance_rates is not None:
            raise ValueError("give acceptance_length or acceptance_rates, not both")
        if self.acceptance_length is not None and self.acceptance_length > self.draft_tokens + 1:
            raise ValueError(
                f"acceptance_length is {self.acceptance_length:g}: {self.draft_tokens} draft tokens commit at most "
                f"{self.draft_tokens + 1} tokens a step"
            )
        rates = self.acceptance_rates
        if rates is not None and (len(rates) != self.draft_tokens or sorted(rates, reverse=True) != rates):
            raise ValueError(f"acceptance_rates must be {self.draft_tokens} rates, none above the one before it")
        return self


class Decode(_Model):
    """Decode tables: how fast both backends decode with exactly so many streams, prefill excluded. One cell for each
    combination of batch, input_tokens, output_tokens and speculation."""

    batch: _Sizes = [1, 2, 4, 8, 16, 32, 64]
    """Streams that decode together."""
    input_tokens: _Sizes = [1]
    """Prompt tokens of each stream (ISL)."""
    output_tokens: _Sizes = [1000]
    """Output tokens of each stream (OSL). No stream takes the place of one that has ended: a window closes with the
    first end."""
    speculation: Annotated[list[Speculating], Field(min_length=1)] = [Speculating()]
    """Speculative settings, each for both servers, which are started again for it: none, or see Speculating. Servers at
    a url stay as they are: name the one setting that they have."""
    rounds: int = Field(1, ge=1, le=1000)
    """How often the balanced order A B B A of passes over all cells is repeated. In turn, each change of backend starts
    a server."""
    repeats: int = Field(3, ge=1, le=1000)
    """Windows of each cell in one pass, one after another."""
    warmup_tokens: int = Field(16, ge=1)
    """Output tokens of the unmeasured batch that precedes each window."""

    @model_validator(mode="after")
    def _settings_differ(self) -> Decode:
        said = [each.model_dump(exclude={"batch"}) for each in self.speculation]
        if any(each in said[:number] for number, each in enumerate(said)):
            raise ValueError("speculation has one setting twice: put all its batch sizes into one entry")
        return self


class ExamSampling(_Model):
    """Sampling of the accuracy evals. Every field is sent with every request, so that no default of a server counts."""

    temperature: float = Field(1.0, ge=0)
    """0: greedy; repeats are then not independent."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Nucleus."""
    top_k: int = Field(0, ge=0)
    """0: all tokens."""
    min_p: float = Field(0.0, ge=0, le=1)
    """0: off."""
    presence_penalty: float = 0.0
    """0: off."""
    frequency_penalty: float = 0.0
    """0: off."""
    repetition_penalty: float = Field(1.0, gt=0)
    """1: off."""
    max_tokens: int = Field(131_072, ge=1)
    """Output tokens at most, thoughts included. Raise it until the baseline's replies are rarely cut off (1 %)."""
    reasoning_effort: str | None = "max"
    """As the model's chat template knows it. null: the one field that is then not sent."""


class Exam(_Model):
    """One benchmark."""

    data: str
    """A file or folder, relative to the experiment file, or hub:OWNER/NAME@REVISION: decodegate eval data check says
    whether it is fit for use."""
    sha256: str | None = None
    """The hash that the data must have."""
    subset: bool = False
    """Fewer items than the whole benchmark has are meant."""
    repeats: int = Field(ge=1, le=1000)
    """Answers to every item on each backend, each with a seed of its own."""
    margin: float = Field(gt=0, lt=1)
    """Largest drop of the mean score, as a share, that may be called none: at most half of a drop that you would roll
    back for."""
    looks: Annotated[list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=1)] = [1.0]
    """Shares of the repeats at which the result is looked at, for instance [0.25, 0.5, 0.75, 1]."""
    concurrency: int = Field(ge=1)
    """Requests in flight at most, on both backends alike: no more than the specialised path takes in a step."""

    @model_validator(mode="after")
    def _looks_rise(self) -> Exam:
        if self.looks != sorted(set(self.looks)) or self.looks[-1] != 1:
            raise ValueError("looks must rise, and the last must be 1")
        return self


class Aime25(Exam):
    """AIME 2025."""

    repeats: int = Field(32, ge=1, le=1000)
    """Answers to every item on each backend, each with a seed of its own."""
    margin: float = Field(0.03, gt=0, lt=1)
    """As in every exam."""
    concurrency: int = Field(30, ge=1)
    """All questions at once: the batch then shrinks through every size."""


class GpqaDiamond(Exam):
    """GPQA-Diamond."""

    repeats: int = Field(16, ge=1, le=1000)
    """Answers to every item on each backend, each with a seed of its own."""
    margin: float = Field(0.02, gt=0, lt=1)
    """As in every exam."""
    concurrency: int = Field(32, ge=1)
    """As in every exam."""


class Mrcr(Exam):
    """OpenAI MRCR."""

    repeats: int = Field(5, ge=1, le=1000)
    """Answers to every item on each backend, each with a seed of its own."""
    margin: float = Field(0.03, gt=0, lt=1)
    """As in every exam."""
    concurrency: int = Field(1, ge=1)
    """One item at a time: a long prompt that is read in makes decode steps standard for all others."""
    max_context: int | None = Field(None, ge=1)
    """Longest item, prompt and answer together, in o200k_base tokens; longer ones are left out on both backends. So is
    what does not fit beside max_tokens by the model's own count, where its server has /tokenize."""


class Evals(_Model):
    """Accuracy evals: the same questions with the same seeds to both backends. For decodegate eval."""

    seed: int = Field(1000, ge=0)
    """Repeat r is sampled with seed + r."""
    sampling: ExamSampling = ExamSampling()
    """See ExamSampling."""
    timeout_s: float = Field(86_400, gt=0)
    """Longest time for one reply; a request that takes longer is not sent again."""
    retries: int = Field(2, ge=0, le=10)
    """How often a request that failed (no connection, HTTP 429 or 5xx) is sent again. They are counted."""
    aime25: Aime25 | None = None
    """See Aime25."""
    gpqa_diamond: GpqaDiamond | None = None
    """See GpqaDiamond."""
    mrcr: Mrcr | None = None
    """See Mrcr."""

    @model_validator(mode="after")
    def _some(self) -> Evals:
        if not self.exams:
            raise ValueError("give at least one of aime25, gpqa_diamond, mrcr")
        return self

    @property
    def exams(self) -> dict[str, Exam]:
        """The benchmarks to run, by name."""
        named = {"aime25": self.aime25, "gpqa_diamond": self.gpqa_diamond, "mrcr": self.mrcr}
        return {name: exam for name, exam in named.items() if exam is not None}


class Parity(_Model):
    """Output parity: whether both backends emit the same tokens, within the noise of one. For decodegate parity."""

    seed: int = Field(1, ge=0)
    """Of prompts, and of sampling."""
    max_context: int | None = Field(None, ge=256)
    """Longest prompt and reply together, tokens. Left out: as long as both backends take."""


_OURS = {
    *("model", "prompt", "messages", "system", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
    *("min_tokens", "ignore_eos", "n", "echo", "best_of", "stop", "logprobs", "prompt_logprobs"),
}
"""Request fields that would change the planned work, or what comes back."""


class Experiment(_Model):
    """A comparison of two decode backends."""

    name: str = "comparison"
    """Title of the report."""
    model: str
    """Model name as served."""
    api: Literal["completions", "chat", "anthropic"] = "completions"
    """completions: token-id prompts, exact lengths. chat, anthropic: messages; need tokenizer."""
    tokenizer: Path | None = None
    """The model's folder or tokenizer.json. Needed for messages; for token ids it makes prompts look like text."""
    token_ids: Annotated[tuple[int, int], Field()] | None = None
    """Without a tokenizer: prompts are made of ids low <= id < high. Default [1000, 30000]."""
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}
    """Request fields sent with every turn as they are."""
    workload: Workload | None = None
    """See Workload. Required, except for decode tables, evals and parity."""
    replay: Replay = Replay()
    """See Replay."""
    decode: Decode | None = None
    """See Decode. For decodegate decode."""
    evals: Evals | None = None
    """See Evals. For decodegate eval."""
    parity: Parity | None = None
    """See Parity. For decodegate parity, which does without it where there is something else."""
    serving: Serving = Serving()
    """See Serving."""
    backends: Backends
    """See Backends."""

    @model_validator(mode="after")
    def _starts(self) -> Experiment:
        served = [each.serve is not None for each in (self.backends.baseline, self.backends.candidate)]
        if self.serving.blocks_per_start > 1 and not (all(served) and self.serving.arrangement == "in_turn"):
            raise ValueError("serving.blocks_per_start is for backends that are both served, in turn")
        if self.serving.arrangement == "side_by_side" and not any(served):
            raise ValueError("serving.arrangement is for servers that decodegate starts (serve): leave it out")
        return self

    @model_validator(mode="after")
    def _tokens(self) -> Experiment:
        if self.api != "completions" and self.tokenizer is None and not self.emulated:
            raise ValueError(f"api: {self.api} needs tokenizer: the folder of the served model (or its tokenizer.json)")
        if self.token_ids is not None and (self.tokenizer is not None or self.api != "completions"):
            raise ValueError("token_ids is for api: completions without a tokenizer")
        if self.token_ids is not None and self.emulated:
            raise ValueError("token_ids is for real servers: the emulator's vocabulary is known")
        if self.token_ids is not None and not 0 <= self.token_ids[0] < self.token_ids[1]:
            raise ValueError("token_ids must be [low, high] with 0 <= low < high")
        if taken := sorted(_OURS & self.sampling.keys()):
            raise ValueError(f"sampling: {', '.join(taken)} is decided by the plan and cannot be set here")
        return self

    @model_validator(mode="after")
    def _something_to_do(self) -> Experiment:
        if all(part is None for part in (self.workload, self.decode, self.evals, self.parity)):
            raise ValueError("give workload (for compare), decode (for decode tables), evals, parity, or several")
        if self.decode is not None and self.api != "completions":
            raise ValueError("decode tables send prompts of token ids: use api: completions, or leave decode out")
        return self

    def backend(self, name: str) -> Backend:
        """The backend called ``name``: baseline or candidate."""
        found: Backend = getattr(self.backends, name)
        return found

    @property
    def emulated(self) -> bool:
        """True when either backend is the embedded emulator."""
        return self.backends.baseline.emulator is not None or self.backends.candidate.emulator is not None


def load_experiment(path: Path) -> Experiment:
    """Read and check an experiment file; relative paths in it are taken from its folder.

    Raises UserError naming each wrong key and what it should be.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the experiment file (YAML) itself")
    try:
        data = yaml.load(path.read_text(), _Loader)  # a safe loader
    except FileNotFoundError:
        known = path.stem if path.stem in presets.names() else None
        way = f": decodegate preset {known} > {path.with_suffix('.yaml')} makes it from the preset" if known else ""
        raise UserError(f"{path}: no such experiment file{way}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not YAML: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: an experiment file is a map with at least model, workload and backends")
    return experiment_of(data, where=str(path), folder=path.parent)


def experiment_of(data: dict[str, Any], *, where: str = "experiment", folder: Path | None = None) -> Experiment:
    """Check the experiment's data. Raises UserError naming each wrong key."""
    try:
        experiment = Experiment.model_validate(data)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            lines.append(f"  {key or 'experiment'}: {_in_words(item['type'], item['msg'], key)}")
        raise UserError(f"{where}: not a valid experiment:\n" + "\n".join(lines)) from None
    if folder is None:
        return experiment
    changes: dict[str, Any] = {}
    if experiment.tokenizer is not None:
        changes["tokenizer"] = (folder / experiment.tokenizer).resolve()
    if experiment.workload is not None and experiment.workload.path is not None:
        path = (folder / experiment.workload.path.expanduser()).resolve()
        changes["workload"] = experiment.workload.model_copy(update={"path": path})
    if experiment.evals is not None:
        changes["evals"] = _exams_in(experiment.evals, folder)
    both = {name: _placed(experiment.backend(name), folder) for name in ("baseline", "candidate")}
    changes["backends"] = experiment.backends.model_copy(update=both)
    return experiment.model_copy(update=changes)


def _placed(backend: Backend, folder: Path) -> Backend:
    changes: dict[str, Any] = {}
    if backend.steps is not None:
        changes["steps"] = (folder / backend.steps.expanduser()).resolve()
    if backend.emulator is not None and backend.emulator.exams is not None:
        exams = (folder / backend.emulator.exams.expanduser()).resolve()
        changes["emulator"] = backend.emulator.model_copy(update={"exams": exams})
    return backend.model_copy(update=changes)


def _exams_in(evals: Evals, folder: Path) -> Evals:
    """With the paths of its data taken from ``folder``."""
    files = {name: exam for name, exam in evals.exams.items() if not exam.data.startswith("hub:")}
    return evals.model_copy(
        update={
            name: exam.model_copy(update={"data": str((folder / Path(exam.data).expanduser()).resolve())})
            for name, exam in files.items()
        }
    )


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one map, where YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


_WORDS = {
    "missing": "is required",
    "tuple_type": "must be two numbers, [low, high]",
    "string_type": "must be a text: put it in quotes",
    "dict_type": "must be a map, {name: value}",
    "model_type": "must be a map of keys",
    "model_attributes_type": "must be a map of keys",
}


def _in_words(kind: str, message: str, key: str) -> str:
    if kind == "extra_forbidden":
        known = sorted({name for model in _Model.__subclasses__() for name in model.model_fields})
        close = difflib.get_close_matches(key.rsplit(".", 1)[-1], known, 1)
        return "unknown key" + (f": did you mean {close[0]}?" if close else "")
    return _WORDS.get(kind, message.removeprefix("Value error, "))


def frozen_yaml(experiment: Experiment) -> str:
    """The experiment with every default written out, without keys and passwords (replay/redaction.py): header values,
    and those of a server's command and environment whose names say that they are. Raises UserError for a command that
    is no list of words."""
    data = experiment.model_dump(mode="json")
    del data["backends"]["both"]  # it is in both already
    for name, backend in data["backends"].items():
        backend["headers"] = dict.fromkeys(backend["headers"], redaction.LEFT_OUT)
        if serve := backend["serve"]:
            command = serve["command"]
            try:
                words = redaction.words(shlex.split(command) if isinstance(command, str) else command)
            except ValueError as error:  # a quote is not closed
                raise UserError(f"backends.{name}.serve.command: {error}") from None
            serve["command"] = shlex.join(words) if isinstance(command, str) else words
            serve["options"] = redaction.values(serve["options"])
            serve["env"] = redaction.values(serve["env"])
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def json_schema() -> str:
    """JSON Schema of the experiment file, for editors."""
    return json.dumps(Experiment.model_json_schema(), indent=2)

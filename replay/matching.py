"""Whether the two backends differ in what is under test and in nothing else: as far as the experiment tells before any
server runs, and then by what the servers show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from replay import backends, eligibility, experiment, gpus, redaction, serve_command, settings
from replay.probes import ServerFacts
from replay.progress import Finding
from replay.records import Backend, Difference, PathRule, Snapshot
from workloads.errors import UserError

Settings = Mapping[str, str]
"""As replay/settings.py gives them."""


_KV_TOLERANCE = 0.02
"""Relative difference of the KV caches that is not worth a word."""


class Seen(msgspec.Struct, kw_only=True):
    """What a running backend shows of itself."""

    facts: ServerFacts
    snapshot: Snapshot | None
    """None for an emulator."""
    settings: Settings | None
    """From /server_info; None if it shows none."""


class Matching(msgspec.Struct, kw_only=True):
    """What is known of the two backends together."""

    backends: list[Backend]
    """As declared, and as far as seen: for the manifest."""
    told: dict[str, Settings]
    """Settings of the backends that we start."""
    impossible: list[str] = []
    """What makes a comparison meaningless, or a server refuse to start."""
    unmatched: list[str] = []
    """In what the backends differ besides what is under test: measured only on demand."""
    differences: list[Difference] = []
    unverified: list[str] = []
    """What could not be checked, in sentences."""
    unchecked: dict[str, list[str]] = {}
    """By backend: what the specialised path needs, and what is not known to be so."""
    findings: list[Finding] = []
    start_up_control: str = ""
    """As RunFacts.start_up_control."""

    @property
    def doubts(self) -> list[str]:
        """All that could not be checked, in sentences."""
        needs = [
            f"{name}: of what the specialised path needs: {', '.join(each)}"
            for name, each in self.unchecked.items()
            if each
        ]
        return [*self.unverified, *needs]

    def refuse(self, *, allow_unmatched: bool) -> None:
        """Raise UserError if the backends cannot be compared, or should not be."""
        if self.impossible:
            raise UserError("these backends cannot be compared:\n" + _list(self.impossible))
        if self.unmatched and not allow_unmatched:
            raise UserError(
                "the backends are not matched, so a difference would not be that of what is under test:\n"
                + _list(self.unmatched)
                + "\nMatch them, or measure anyway with --allow-unmatched (every page of the report will say so)."
            )


def _list(lines: list[str]) -> str:
    return "\n".join("  " + line.replace("\n", "\n  ") for line in lines)


def declared(whole: experiment.Experiment) -> Matching:
    """What the experiment alone tells. Raises UserError for a server's command that cannot be understood."""
    matching = Matching(backends=[backends.described(whole, name) for name in backends.NAMES], told={})
    for backend in matching.backends:
        given: experiment.Backend = getattr(whole.backends, backend.name)
        if given.serve is None:
            continue
        words = serve_command.completed(given, backends.model_name(whole, backend.name), backend.name)
        environment = serve_command.environment(given.serve, f"backends.{backend.name}.serve")
        backend.command = redaction.words(words)
        told = settings.from_command(words, environment)
        matching.told[backend.name] = told
        backend.files = backends.files(told)
        if given.gpus is not None:
            matching.impossible += [f"{backend.name}: {each}" for each in settings.layout_problems(given.gpus, told)]
        _judge_path(matching, backend, told, version=None)
        matching.impossible += _vocabulary_problems(whole, backend.name, told)
    matching.unmatched += gpus.mismatches(*matching.backends)
    if len(matching.told) == 2:
        matching.differences = settings.differences(
            matching.told["baseline"], matching.told["candidate"], whole.serving.under_test
        )
        if refused := settings.refusal(matching.differences):
            matching.unmatched.append(refused)
        matching.findings += _under_test(matching.differences, whole.serving.under_test)
    return matching


def _vocabulary_problems(whole: experiment.Experiment, name: str, told: Settings) -> Iterator[str]:
    """Token ids that the model does not have, where its folder tells how many it has."""
    config = eligibility.read_config(told["model"]) if told.get("model") else None
    text = (config or {}).get("text_config") or config or {}
    size = text.get("vocab_size")
    high = (whole.token_ids or backends.DEFAULT_TOKEN_IDS)[1]
    if whole.tokenizer is None and isinstance(size, int) and high > size:
        yield (
            f"{name}: prompts would be made of token ids up to {high:,}, but its model has {size:,}: give tokenizer "
            f"(the model's folder), or token_ids: [low, {size}]"
        )


def seen(whole: experiment.Experiment, matching: Matching, found: dict[str, Seen]) -> None:
    """Add to ``matching`` what the running servers show; its findings are then those of this look alone."""
    matching.findings = []
    for backend in matching.backends:
        shown = found[backend.name]
        backend.settings |= shown.facts.server
        backend.emulated = backend.emulated or shown.facts.emulated
        _look(matching, backend, shown)
    baseline, candidate = (found[name] for name in backends.NAMES)
    if baseline.snapshot is not None and candidate.snapshot is not None:
        matching.unmatched += gpus.unequal(baseline.snapshot, candidate.snapshot)
        if where := gpus.told(baseline.snapshot, candidate.snapshot):
            matching.findings.append(Finding("ok", where))
    digests = [each.facts.tokenizer_digest for each in (baseline, candidate)]
    if None not in digests and digests[0] != digests[1]:
        matching.impossible.append(
            "the backends' tokenizers differ: the same text is other tokens; serve both with one tokenizer"
        )
    versions = [each.facts.server.get("version") for each in (baseline, candidate)]
    if None in versions:
        silent = " and ".join(name for name, told in zip(backends.NAMES, versions, strict=True) if told is None)
        matching.unverified.append(f"that both servers are one version: {silent} does not tell (/version)")
    elif versions[0] != versions[1]:
        matching.unmatched.append(f"version of the server: baseline {versions[0]}, candidate {versions[1]}")
    matching.findings += _kv_caches(baseline.facts, candidate.facts)
    if len(matching.told) < 2 and None in (baseline.settings, candidate.settings):
        matching.unmatched += _unlike(whole, baseline.facts, candidate.facts)
    _compare_settings(whole, matching, baseline.settings, candidate.settings)
    matching.findings += _fingerprints(matching, baseline, candidate)


def _kv_caches(baseline: ServerFacts, candidate: ServerFacts) -> Iterator[Finding]:
    sizes = [facts.kv_cache.tokens * facts.kv_cache.engines for facts in (baseline, candidate) if facts.kv_cache]
    if len(sizes) == 2 and abs(sizes[0] / sizes[1] - 1) > _KV_TOLERANCE:
        yield Finding(
            "warning",
            f"the KV cache holds {sizes[0]:,} tokens on the baseline and {sizes[1]:,} on the candidate",
            "give both the same size (--kv-cache-memory-bytes), as vLLM takes what it finds free when it starts",
            why="the smaller one computes more prompts again, which is no effect of the decode path",
        )


def _unlike(whole: experiment.Experiment, baseline: ServerFacts, candidate: ServerFacts) -> Iterator[str]:
    """What servers that do not show their settings showed in their replies and counters."""
    showed = {
        "enable-prefix-caching": (baseline.prefix_caching, candidate.prefix_caching),
        "speculative-config": (baseline.speculative, candidate.speculative),
    }
    for key, (one, other) in showed.items():
        if None not in (one, other) and one != other and key not in whole.serving.under_test:
            only = "baseline" if one else "candidate"
            yield f"{key}: only the {only} has it: make them equal, or name it in serving.under_test"


def _look(matching: Matching, backend: Backend, shown: Seen) -> None:
    """One backend's own settings and GPUs."""
    known = shown.settings if shown.settings is not None else matching.told.get(backend.name)
    if shown.snapshot is not None:
        problems, doubts = gpus.verified(backend, shown.snapshot)
        matching.unmatched += problems
        matching.unverified += doubts
        version = shown.facts.server.get("version")
        _judge_path(matching, backend, known, version=str(version) if version else None, snapshot=shown.snapshot)
    if backend.gpus is not None and shown.settings is not None:
        matching.impossible += [
            f"{backend.name}: {problem}" for problem in settings.layout_problems(backend.gpus, shown.settings)
        ]
    if shown.settings is None and not backend.emulated and backend.name not in matching.told:
        matching.unverified.append(
            f"{backend.name}: its settings, its layout too, are as declared: /server_info shows none (start vLLM with "
            "VLLM_SERVER_DEV_MODE=1, in a closed network)"
        )
    elif shown.settings is not None:
        configured = shown.settings.get("additional-config.decode_backend", "auto")
        if configured != backend.decode_backend:
            matching.impossible.append(
                f"{backend.name}: decode_backend is declared {backend.decode_backend}, but its server runs with "
                f"{configured}"
            )


def _judge_path(
    matching: Matching,
    backend: Backend,
    known: Settings | None,
    *,
    version: str | None,
    snapshot: Snapshot | None = None,
) -> None:
    """Which of its decode steps can run specialised; whether its server can run it at all."""
    gpu = snapshot.gpus[0].name if snapshot is not None and snapshot.gpus else backend.gpus and backend.gpus.kind
    deployment = eligibility.Deployment(
        settings=dict(known) if known is not None else None,
        config=eligibility.read_config(known["model"]) if known is not None and known.get("model") else None,
        gpu=gpu or None,
        version=version,
    )
    backend.path = eligibility.rule(deployment)
    if backend.decode_backend != "latency_specialized":
        return
    problems = eligibility.refusals(deployment)
    model_type = (deployment.config or {}).get("model_type")
    if eligibility.consumes_key(model_type, version, gpu or None) is False and not problems:
        problems = [
            f"{f'model type {model_type}' if model_type else 'its model'} in vLLM {version or 'of any version'} does "
            "not read decode_backend: the candidate would be running standard decode"
        ]
    matching.impossible += [
        f"{backend.name}: {problem}" for problem in problems if f"{backend.name}: {problem}" not in matching.impossible
    ]
    if backend.path is not None and not backend.path.problems:
        matching.findings.append(Finding("ok", f"{backend.name}: {_in_words(backend.path)}"))
    matching.unchecked[backend.name] = eligibility.unchecked(deployment)


def _in_words(rule: PathRule) -> str:
    """What the path takes, by its rule."""
    each = f"{rule.tokens_per_request} tokens each, " if rule.tokens_per_request > 1 else ""
    return (
        f"decode steps of up to {rule.max_requests} requests ({each}in batches padded to "
        f"{', '.join(map(str, rule.sizes))} tokens) can run specialised, by the rule of {rule.model} in {rule.source}"
    )


def _under_test(found: list[Difference], names: list[str]) -> Iterator[Finding]:
    meant = [difference for difference in found if difference.under_test]
    for difference in meant:
        yield Finding("ok", f"under test: {difference.key}: {difference.values}")
    if not meant:
        yield Finding(
            "warning",
            f"the backends do not differ in what is under test ({', '.join(names)}): this measures their noise",
        )
        return
    for name in names:
        if not any(settings.covers(name, difference.key) for difference in meant):
            yield Finding("note", f"serving.under_test names {name}, in which the backends do not differ")


def _fingerprints(matching: Matching, baseline: Seen, candidate: Seen) -> Iterator[Finding]:
    prints = [each.facts.server.get("fingerprint") for each in (baseline, candidate)]
    differ = any(difference.under_test for difference in matching.differences)
    differ = differ or matching.backends[0].decode_backend != matching.backends[1].decode_backend
    if differ and None not in prints and prints[0] == prints[1]:
        yield Finding(
            "warning",
            f"both servers have the fingerprint {prints[0]}, which hashes their settings",
            "see that each runs what it is meant to",
            why="the two may be one configuration",
        )


def _compare_settings(
    whole: experiment.Experiment, matching: Matching, baseline: Settings | None, candidate: Settings | None
) -> None:
    """What /server_info shows of both, against each other."""
    if baseline is None or candidate is None:
        return
    found = settings.differences(baseline, candidate, whole.serving.under_test)
    if len(matching.told) == 2:
        # their commands are equal but for what is under test: the rest follows from it
        known = {difference.key for difference in matching.differences}
        extra = [each.key for each in found if not each.under_test and each.key not in known]
        if extra:
            shown = ", ".join(extra[:6]) + (f" and {len(extra) - 6} more" if len(extra) > 6 else "")
            matching.findings.append(Finding("note", f"settings that differ as a consequence: {shown}"))
        return
    matching.differences = found
    if refused := settings.refusal(found):
        matching.unmatched.append(refused)
    matching.findings += _under_test(found, whole.serving.under_test)

"""What two backends have in common, and what they must not differ in: by the experiment, and by what servers show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from replay.experiment import Experiment, experiment_of
from replay.matching import Matching, Seen, declared, seen
from replay.probes import KvCache, ServerFacts
from replay.records import GpuReading, Snapshot
from tests.replay.test_eligibility import K3
from workloads.errors import UserError
from workloads.rendering import Template

SPECIALISED = "latency_specialized"
KEY = "additional-config.decode_backend"
GPUS = {"count": 8, "kind": "GB300", "layout": {"tp": 8}}
SHOWN = {"tensor-parallel-size": "8", "kv-cache-dtype": "fp8", KEY: "auto"}
"""By /server_info."""


def experiment(
    baseline: dict[str, Any], candidate: dict[str, Any], both: dict[str, Any] | None = None, **serving: Any
) -> Experiment:
    return experiment_of(
        {
            "model": "m",
            "workload": {"demo": True},
            "serving": serving,
            "backends": {"both": {"gpus": GPUS, **(both or {})}, "baseline": baseline, "candidate": candidate},
        }
    )


def pair(**serving: Any) -> Experiment:
    """Two URLs."""
    return experiment({"url": "http://a"}, {"url": "http://b", "decode_backend": SPECIALISED}, **serving)


def served(*options: str, both: dict[str, Any] | None = None, **serving: Any) -> Experiment:
    """Two commands; ``options``: of the candidate."""
    command = ["vllm", "serve", "m", "-tp", "8"]
    serve = {"serve": {"command": command}, "decode_backend": "auto"}
    return experiment(serve, {**serve, "serve": {"command": [*command, *options]}}, both, **serving)


def one(settings: dict[str, str] | None = None, gpus: list[GpuReading] | None = None, **facts: Any) -> Seen:
    """A real server of vLLM 0.33.0."""
    server = {"version": "0.33.0", "fingerprint": None, "max_model_len": 4096, **facts.pop("server", {})}
    shown = ServerFacts(
        url="http://a", control=0, template=Template(), max_model_len=4096, emulated=False, time_scale=1.0,
        server=server, findings=[], **facts,
    )  # fmt: skip
    return Seen(facts=shown, snapshot=Snapshot(t_ns=0, gpus=gpus, gpus_unseen="another host"), settings=settings)


def look(whole: Experiment, baseline: Seen, candidate: Seen) -> Matching:
    matching = declared(whole)
    seen(whole, matching, {"baseline": baseline, "candidate": candidate})
    return matching


def said(matching: Matching) -> str:
    return "\n".join(map(str, matching.findings))


# -- by the experiment alone


def test_what_is_under_test_is_found_in_the_commands() -> None:
    whole = served("--max-num-seqs", "8", under_test=["max-num-seqs"])
    matching = declared(whole)
    assert said(matching) == "ok: under test: max-num-seqs: not set against 8"
    assert [(each.key, each.baseline, each.candidate, each.under_test) for each in matching.differences] == [
        ("max-num-seqs", None, "8", True)
    ]
    assert matching.impossible == matching.unmatched == []
    matching.refuse(allow_unmatched=False)


def test_two_equal_commands_measure_noise() -> None:
    matching = declared(served())
    assert said(matching).startswith(
        "WARNING: the backends do not differ in what is under test (additional-config.decode_backend)"
    )
    assert matching.unmatched == []


def test_other_differences_are_refused_unless_forced() -> None:
    matching = declared(served("--kv-cache-dtype", "fp8", "--max-num-seqs", "8", under_test=["max-num-seqs"]))
    with pytest.raises(UserError) as told:
        matching.refuse(allow_unmatched=False)
    assert "kv-cache-dtype: not set against fp8" in str(told.value)
    assert "max-num-seqs" not in str(told.value)
    matching.refuse(allow_unmatched=True)


def test_what_is_impossible_cannot_be_forced() -> None:
    matching = Matching(backends=[], told={}, impossible=["one\ntwo"], unmatched=["three"])
    for force in (False, True):
        with pytest.raises(UserError, match=r"cannot be compared:\n  one\n  two$"):
            matching.refuse(allow_unmatched=force)


def test_gpus_that_are_not_declared_are_unmatched() -> None:
    whole = experiment({"url": "http://a", "gpus": None}, {"url": "http://b"})
    assert declared(whole).unmatched == ["baseline: GPUs are not declared (gpus: {count: N, kind: ...})"]


def test_a_command_that_uses_other_gpus_than_declared_is_impossible() -> None:
    assert declared(served("-tp", "4")).impossible == [
        "candidate: gpus.layout says tp 8, but tensor-parallel-size is 4",
        "candidate: gpus.count says 8, but tensor-parallel-size 4 x data-parallel-size 1 uses 4",
    ]


def test_the_model_decides_the_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    serve = {"serve": {"command": ["vllm", "serve", str(tmp_path), "-tp", "8"]}}
    matching = declared(experiment(serve, {**serve, "decode_backend": SPECIALISED}))
    assert len(matching.impossible) == 1
    assert matching.impossible[0].startswith("candidate: model type llama")
    assert "standard decode" in matching.impossible[0]
    assert [backend.path for backend in matching.backends] == [None, None]


# -- by what URL pairs show


def test_settings_that_servers_show_are_compared() -> None:
    candidate = SHOWN | {KEY: SPECIALISED, "kv-cache-dtype": "auto"}
    matching = look(pair(), one(SHOWN), one(candidate))
    assert [(each.key, each.under_test) for each in matching.differences] == [(KEY, True), ("kv-cache-dtype", False)]
    assert len(matching.unmatched) == 1
    assert "kv-cache-dtype: fp8 against auto" in matching.unmatched[0]
    assert f"ok: under test: {KEY}: auto against {SPECIALISED}" in said(matching)
    assert matching.impossible == []


def test_settings_that_are_not_shown_are_not_verified() -> None:
    matching = look(pair(), one(SHOWN), one())
    assert matching.differences == []
    assert matching.unmatched == []
    doubts = "\n".join(matching.doubts)
    assert "candidate: its settings, its layout too, are as declared: /server_info shows none" in doubts
    assert "baseline: its settings" not in doubts
    assert "candidate: 8 x GB300 is as declared: another host" in doubts


def test_a_server_that_runs_with_another_decode_backend_than_declared_is_refused() -> None:
    matching = look(pair(), one(SHOWN), one(SHOWN))
    assert matching.impossible == [
        "candidate: decode_backend is declared latency_specialized, but its server runs with auto"
    ]
    unset = {name: text for name, text in SHOWN.items() if name != KEY}
    assert look(pair(), one(unset), one(SHOWN | {KEY: SPECIALISED})).impossible == []


def test_a_layout_that_servers_show_otherwise_is_refused() -> None:
    four = SHOWN | {"tensor-parallel-size": "4", KEY: SPECIALISED}
    matching = look(pair(), one(SHOWN), one(four))
    assert matching.impossible == [
        "candidate: gpus.layout says tp 8, but tensor-parallel-size is 4",
        "candidate: gpus.count says 8, but tensor-parallel-size 4 x data-parallel-size 1 uses 4",
    ]


def test_a_server_whose_version_does_not_read_the_key_is_refused() -> None:
    old = {"version": "0.32.0"}
    matching = look(pair(), one(server=old), one(server=old))
    assert matching.impossible == [
        "candidate: its model in vLLM 0.32.0 does not read decode_backend: the candidate would be running standard "
        "decode"
    ]


def test_tokenizers_that_differ_are_refused_and_versions_too() -> None:
    whole = experiment({"url": "http://a"}, {"url": "http://b"})
    matching = look(whole, one(tokenizer_digest="x"), one(tokenizer_digest="y", server={"version": "0.33.1"}))
    assert matching.impossible == [
        "the backends' tokenizers differ: the same text is other tokens; serve both with one tokenizer"
    ]
    assert matching.unmatched == ["version of the server: baseline 0.33.0, candidate 0.33.1"]
    unknown = look(whole, one(tokenizer_digest="x"), one(server={"version": None}))
    assert unknown.impossible == unknown.unmatched == []
    assert any("candidate does not tell (/version)" in doubt for doubt in unknown.doubts)


@pytest.mark.parametrize(
    ("shown", "fingerprints", "warned"),
    [
        (True, ("f-1", "f-1"), True),
        (False, ("f-1", "f-1"), True),
        (True, ("f-1", "f-2"), False),
        (True, (None, None), False),
    ],
)
def test_equal_fingerprints_of_servers_that_should_differ(
    shown: bool, fingerprints: tuple[str | None, str | None], warned: bool
) -> None:
    settings = (SHOWN, SHOWN | {KEY: SPECIALISED}) if shown else (None, None)
    both = [one(each, server={"fingerprint": print}) for each, print in zip(settings, fingerprints, strict=True)]
    matching = look(pair(), *both)
    assert ("both servers have the fingerprint f-1" in said(matching)) is warned


def test_equal_fingerprints_of_equal_servers_are_as_they_should_be() -> None:
    whole = experiment({"url": "http://a"}, {"url": "http://b"})
    same = one(SHOWN, server={"fingerprint": "f-1"})
    assert "fingerprint" not in said(look(whole, same, same))


def test_gpus_that_differ_by_nvml_are_unmatched() -> None:
    def reading(name: str) -> GpuReading:
        return GpuReading(index=0, uuid=name, name=name, memory_bytes=1 << 37, power_limit_w=700.0, mig=False)

    whole = experiment({"url": "http://a"}, {"url": "http://b"}, {"gpus": {"count": 1, "kind": "NVIDIA"}})
    matching = look(whole, one(gpus=[reading("NVIDIA H200")]), one(gpus=[reading("NVIDIA H100")]))
    assert matching.unmatched == ["GPU name: baseline NVIDIA H200, candidate NVIDIA H100"]
    assert "baseline runs on 1 x NVIDIA H200 (index 0), candidate on 1 x NVIDIA H100 (index 0)" in said(matching)


# -- by what servers of ours show


def test_what_follows_from_the_setting_under_test_is_a_note() -> None:
    whole = served("--max-num-seqs", "8", under_test=["max-num-seqs"])
    sizes = "compilation-config.cudagraph_capture_sizes"
    baseline = {"tensor-parallel-size": "8", "max-num-seqs": "256", sizes: "1, 2, 256"}
    matching = look(whole, one(baseline), one(baseline | {"max-num-seqs": "8", sizes: "1, 2, 8"}))
    assert matching.unmatched == matching.impossible == []
    assert said(matching) == f"note: settings that differ as a consequence: {sizes}"
    assert [each.key for each in matching.differences] == ["max-num-seqs"]


def test_many_consequences_are_counted() -> None:
    whole = served("--max-num-seqs", "8", under_test=["max-num-seqs"])
    more = {f"option-{n}": "1" for n in range(9)}
    matching = look(whole, one({"tensor-parallel-size": "8"}), one({"tensor-parallel-size": "8", **more}))
    assert said(matching).endswith("option-4, option-5 and 3 more")


def test_the_path_of_a_running_server_is_judged_with_its_version(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(K3))
    serve = {"serve": {"command": ["vllm", "serve", str(tmp_path), "-tp", "8", "--dtype", "bfloat16"]}}
    whole = experiment(serve, {**serve, "decode_backend": SPECIALISED})
    before = declared(whole)
    assert before.impossible == []
    assert any("of what the specialised path needs: " in d and "version of vLLM" in d for d in before.doubts)
    matching = look(whole, one(), one())
    assert matching.impossible == []
    needs = [doubt for doubt in matching.doubts if "of what the specialised path needs" in doubt]
    assert all("version of vLLM" not in doubt for doubt in needs)
    assert len(needs) <= 1
    path = matching.backends[1].path
    assert path is not None
    assert (path.model, path.problems) == ("Kimi K3 on NVIDIA", [])
    old = look(whole, one(server={"version": "0.32.0"}), one(server={"version": "0.32.0"}))
    assert len(old.impossible) == 1
    assert "vLLM 0.32.0 does not read decode_backend" in old.impossible[0]


def test_a_slip_in_a_name_under_test_is_told() -> None:
    matching = declared(served("--max-num-seqs", "8", under_test=["max_num_seqs", "kv-cache-dtyp"]))
    assert "names kv-cache-dtyp, in which the backends do not differ" in said(matching)
    assert "names max_num_seqs" not in said(matching)


def test_servers_that_hide_their_settings_still_show_some_of_them() -> None:
    silent = {"prefix_caching": True, "speculative": False}
    whole = pair(under_test=[KEY])
    assert look(whole, one(**silent), one(**silent)).unmatched == []
    (reason,) = look(whole, one(**silent), one(**silent | {"speculative": True})).unmatched
    assert reason.startswith("speculative-config: only the candidate has it")
    (reason,) = look(whole, one(**silent), one(**silent | {"prefix_caching": None, "speculative": True})).unmatched
    meant = pair(under_test=[KEY, "speculative-config"])
    assert look(meant, one(**silent), one(**silent | {"speculative": True})).unmatched == []


def test_kv_caches_of_unequal_size_are_named() -> None:
    whole = pair(under_test=[KEY])
    small, large = (KvCache(tokens=tokens, engines=1, exact=True) for tokens in (106_448, 214_080))
    assert "holds 106,448 tokens on the baseline and 214,080" in said(
        look(whole, one(kv_cache=small), one(kv_cache=large))
    )
    assert "KV cache" not in said(look(whole, one(kv_cache=small), one(kv_cache=small)))

"""The specialised decode path really ran, where it should and only there."""

from __future__ import annotations

from replay.records import Backend
from reports.coverage import OPEN, SPECIALISED, PathCoverage, Source
from reports.gates.gate import Evidence, Gate, Status, Thresholds


def judge(evidence: Evidence) -> Gate:
    """Share of decode tokens inside the measured windows that ran specialised: at least the floor on a backend set to
    latency_specialized, about none elsewhere. Unknown where the server keeps no log of its steps, or one that could
    mean either: then only two deployments are compared, which the conclusion says first (reports.conclusion). Nothing
    is to be proved where no backend is set so."""
    thresholds = evidence.thresholds
    found = list(zip(evidence.run.manifest.backends, evidence.paths, strict=True))
    asked = [(backend, path) for backend, path in found if backend.decode_backend == SPECIALISED]
    problems = [problem for backend, path in found for problem in _problems(backend, path, thresholds)]
    unproven = [_unproven(backend, path, thresholds) for backend, path in found if not path.measured]
    unproven += [why for backend, path in asked if path.measured and (why := _open(backend, path, thresholds))]
    silent = [path.backend for _, path in found if path.source == "none"]
    if len(silent) == 2:
        unproven = [f"the servers of {silent[0]} and {silent[1]} do not tell which path their decode steps took"]
    status: Status = "pass"
    if problems:
        status, said = "fail", problems
    elif not asked:
        said = ["no backend is set to latency_specialized"]
    elif unproven:
        status, said = "unknown", unproven
    else:
        said = ["specialised where it was asked for, by the server's own log of steps"]
    shares = [
        (path.total.share, _NUMBER_IS[path.source])
        for _, path in asked
        if path.total is not None and (path.counted == "specialised" or not path.measured)
    ]
    number, number_is = min(shares, default=(None, ""))
    explanation = "; ".join(said)
    return Gate(
        id="path_proof",
        title="Proof of path",
        status=status,
        required=False,
        number=number,
        number_is=number_is,
        limit=thresholds.specialised_share,
        limit_is="at least",
        unit="share",
        explanation=explanation[0].upper() + explanation[1:] + ".",
        numbers=_numbers(evidence.paths),
    )


_NUMBER_IS: dict[Source, str] = {
    "step log": "",
    "emulator": "",
    "graph table": "of steps",
    "prediction": "predicted",
}


def _problems(backend: Backend, path: PathCoverage, thresholds: Thresholds) -> list[str]:
    """What shows that a backend's steps took another path than the one that was set."""
    name, total = backend.name, path.total
    if backend.decode_backend != SPECIALISED:
        if SPECIALISED in path.set_by_server:
            return [f"{name} is set to {backend.decode_backend}, but its server's own configuration has {SPECIALISED}"]
        if path.source == "emulator" and total is not None and total.share > thresholds.stray_specialised_share:
            return [f"{total.share:.1%} of {name}'s decode tokens ran specialised although it is set to "
                    f"{backend.decode_backend}"]  # fmt: skip
        return []
    problems = []
    if backend.path is not None and backend.path.problems:
        problems.append(f"{name} cannot run specialised: {'; '.join(backend.path.problems)}")
    others = [value for value in path.set_by_server if value != SPECIALISED]
    if others:
        problems.append(
            f"{name} is running standard decode: decode_backend in its server's own configuration: {', '.join(others)}"
        )
    if path.counted == "specialised" and path.at_most is not None and path.at_most < thresholds.specialised_share:
        assert total is not None  # it has bounds
        why = ", ".join(f"{reason} ({share:.0%})" for reason, share in list(total.reasons.items())[:3])
        problems.append(f"only {total.share:.1%} of {name}'s decode tokens ran specialised; the rest: {why}")
    return problems


def _unproven(backend: Backend, path: PathCoverage, thresholds: Thresholds) -> str:
    """What is known of a backend whose server does not tell."""
    said = f"the server of {backend.name} does not tell which path its decode steps took"
    if path.total is None or path.at_least is None or path.at_most is None:
        return said
    if path.source == "graph table":
        return f"{said}; by the tables of --cudagraph-metrics {path.total.share:.1%} of its steps were {path.counted}"
    between = f"{path.at_least:.1%}" + (f" to {path.at_most:.1%}" if path.at_most > path.at_least else "")
    said += f"; predicted, not measured: {between} of its decode tokens fit the specialised path"
    if backend.decode_backend == SPECIALISED and path.at_most < thresholds.specialised_share:
        said += f", so expect less than the {thresholds.specialised_share:.0%} that a proof needs"
    return said


def _open(backend: Backend, path: PathCoverage, thresholds: Thresholds) -> str | None:
    """Why a log of steps does not settle it; None if it does."""
    if path.counted != "specialised":
        return (
            f"no rule of a specialised path is known for {backend.name}, so its log of steps cannot show which ran "
            "specialised"
        )
    assert path.total is not None  # such a log has steps
    assert path.at_least is not None
    if path.at_least >= thresholds.specialised_share:
        return None
    why = [f"{reason} ({path.total.reasons[reason]:.0%})" for reason in OPEN if reason in path.total.reasons]
    return (
        f"between {path.at_least:.1%} and {path.at_most:.1%} of {backend.name}'s decode tokens ran specialised: "
        + ", ".join([*why, *path.notes])
    )


def _numbers(paths: list[PathCoverage]) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {}
    for path in paths:
        if path.total is None:
            continue
        for what, share in (("tokens", path.total.share_of_tokens), ("steps", path.total.share_of_steps)):
            if share is not None:
                numbers[f"{path.backend}: decode {what}, {path.counted}"] = share
        if path.full_graphs is not None and path.counted != "pure decode in FULL graphs":
            numbers[f"{path.backend}: decode tokens, pure decode in FULL graphs"] = path.full_graphs
    return numbers

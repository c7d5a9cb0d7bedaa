"""Both backends read the same prompts, token for token."""

from __future__ import annotations

from evals.records import Answer
from reports.accuracy.tasks import KINDS
from reports.signoff.gates.evidence import Evidence, gate
from reports.signoff.parts import EvalsPart
from reports.signoff.result import Gate


def judge(evidence: Evidence) -> list[Gate]:
    """Hashes of the prompts' token ids where both servers tell them, else their number of tokens; that the same bytes
    were sent is a condition of every benchmark's result (reports.accuracy.answers)."""
    evals = evidence.parts.evals
    if evals is None:
        return []
    missing, by_ids, by_count, unseen = [], 0, 0, 0
    for task in evals.plan.tasks:
        ids = count = 0
        for one, other in _pairs(evals, task.task):
            if one.prompt_ids_hash is not None and other.prompt_ids_hash is not None:
                by_ids += 1
                ids += one.prompt_ids_hash != other.prompt_ids_hash
            elif one.prompt_tokens is not None and other.prompt_tokens is not None:
                by_count += 1
                count += one.prompt_tokens != other.prompt_tokens
            else:
                unseen += one.error is None and other.error is None
        for different, what in ((ids, "other token ids"), (count, "another number of tokens")):
            if different:
                missing.append(
                    f"{KINDS[task.task].title}: {different:,} prompts had {what} on the candidate: its chat "
                    "template or tokenizer is another. Make them alike and run the evals again."
                )
    if unseen:
        missing.append(f"{unseen:,} pairs of prompts cannot be compared: a server told neither token ids nor usage.")
    if not missing and not by_ids and not by_count:
        missing.append("Not one prompt was answered on both backends: run the evals to their end.")
    said = [f"{by_ids:,} pairs of prompts have equal token ids" if by_ids else "no token ids were told"]
    if by_count:
        said.append(f"{by_count:,} equal numbers of tokens")
    text = "Prompts differ, or cannot be compared." if missing else f"{', '.join(said).capitalize()}."
    return [gate("prompts_same", "The same prompts", text, missing)]


def _pairs(evals: EvalsPart, task: str) -> list[tuple[Answer, Answer]]:
    """Answers of both backends to the same item in the same repeat."""
    first, second = (
        {(each.item, each.repeat): each for sitting in evals.of(name, task) for each in sitting.answers}
        for name in evals.names
    )
    return [(first[key], second[key]) for key in sorted(first.keys() & second.keys())]

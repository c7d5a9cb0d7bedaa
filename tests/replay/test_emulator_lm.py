"""The emulator's language model: its distribution, how it is sampled, and decode steps with and without faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from replay.emulator import decoding, faults, language, lm, speech
from replay.emulator.decoding import Faulty, Place, generate, replay, together
from replay.emulator.lm import Context, Logits, Sampling
from replay.emulator.noise import mix, mixed, normals, unit, units
from replay.emulator.scheduler import Scheduler, Sequence
from replay.emulator.settings import EmulatorSettings

VOCABULARY = np.arange(language.VOCAB_SIZE)


def some_contexts(n: int, seed: int = 0) -> Context:
    luck = np.random.default_rng(seed)
    return Context(
        luck.integers(language.FIRST_WORD, language.VOCAB_SIZE, (n, 3)),
        luck.integers(0, 100_000, n),
        luck.integers(0, 1 << 63, n).astype(np.uint64),
    )


def some_prompts(n: int, length: int = 40, seed: int = 0) -> list[NDArray[np.int64]]:
    luck = np.random.default_rng(seed)
    return [luck.integers(language.FIRST_WORD, language.VOCAB_SIZE, length) for _ in range(n)]


def row(found: Logits, index: int, times: int = 1) -> Logits:
    return Logits(*(np.repeat(field[index : index + 1], times, axis=0) for field in found))


def whole_distribution(found: Logits, index: int) -> NDArray[np.float64]:
    """Probability of every token of the vocabulary."""
    one = row(found, index)
    probabilities: NDArray[np.float64] = np.exp(lm.values_of(one, VOCABULARY[None, :])[0] - lm.log_sum(one)[0])
    return probabilities


def differs(found: lm.Scores, other: lm.Scores) -> NDArray[np.bool_]:
    changed: NDArray[np.bool_] = (found.top_logprobs != other.top_logprobs).any(axis=1)
    return changed | (found.logprobs != other.logprobs) | (found.top_ids != other.top_ids).any(axis=1)


def same_but_for(found: lm.Scores, other: lm.Scores, changed: NDArray[np.bool_]) -> None:
    """All scores agree exactly outside ``changed``, and none inside."""
    assert changed.any()
    assert np.array_equal(differs(found, other), changed)


# --- noise ------------------------------------------------------------------------------------------------------------


def test_numbers_of_arrays_are_those_of_single_ones() -> None:
    values = [-3, 0, 5, (1 << 63) - 1]
    assert mixed(np.array(values), 7, 3, 1).tolist() == [mix(value, 7, 3, 1) for value in values]
    assert mixed((1 << 64) - 1, np.array(values)).tolist() == [mix((1 << 64) - 1, value) for value in values]
    assert units(mixed(np.array(values), 7)).tolist() == [unit(value, 7) for value in values]
    drawn = normals(mixed(np.arange(200_000), 1))
    assert drawn.mean() == pytest.approx(0, abs=0.01)
    assert drawn.std() == pytest.approx(1, abs=0.01)


# --- the distribution -------------------------------------------------------------------------------------------------


def test_probabilities_of_the_whole_vocabulary_add_up_to_one() -> None:
    found = lm.logits(some_contexts(50))
    for index in range(50):
        assert len(set(found.ids[index])) == lm.CANDIDATES + 1
        assert whole_distribution(found, index).sum() == pytest.approx(1, abs=1e-12)


def test_most_positions_have_a_clear_token_and_the_gap_varies_down_to_nothing() -> None:
    found = lm.logits(some_contexts(20_000))
    scores = lm.score(found, found.ids[:, 0], top=2)
    best = np.exp(scores.top_logprobs[:, 0])
    gap = scores.top_logprobs[:, 0] - scores.top_logprobs[:, 1]
    assert np.quantile(best, [0.03, 0.99]) == pytest.approx([0.34, 0.999], abs=0.03)
    assert (best > 0.8).mean() > 0.6
    for low, high in ((0, 0.1), (0.1, 0.2), (1, 1.1), (4, 4.1)):
        assert 0.005 < ((gap >= low) & (gap < high)).mean() < 0.03


def test_logprob_rank_and_top_20_are_those_of_the_whole_distribution() -> None:
    found = lm.logits(some_contexts(20))
    for index in range(20):
        whole = np.log(whole_distribution(found, index))
        order = np.argsort(-whole)
        for rank, token in enumerate(order[:20].tolist(), 1):
            scores = lm.score(row(found, index), [token], top=20)
            assert scores.ranks.tolist() == [rank]
            assert scores.logprobs[0] == pytest.approx(whole[token], rel=1e-6)
            assert scores.top_ids[0].tolist() == order[:20].tolist()
            assert scores.top_logprobs[0] == pytest.approx(whole[order[:20]], rel=1e-6)
    other = np.setdiff1d(VOCABULARY, found.ids[0])[:1]
    scores = lm.score(row(found, 0), other)
    assert scores.ranks.tolist() == [lm.CANDIDATES + 2]
    assert np.exp(scores.logprobs[0].astype(float)) * lm.OTHERS == pytest.approx(lm.REST, rel=3)


def test_every_part_of_the_context_matters() -> None:
    base = some_contexts(1)
    found = lm.logits(base)
    for place in range(3):
        before = base.before.copy()
        before[0, place] += 1
        assert not np.array_equal(lm.logits(base._replace(before=before)).ids, found.ids)
    assert not np.array_equal(lm.logits(base._replace(position=base.position + 1)).ids, found.ids)
    assert not np.array_equal(lm.logits(base, weights=1).ids, found.ids)
    wrong = lm.logits(base._replace(state=base.state + np.uint64(1)))
    assert np.array_equal(wrong.ids, found.ids)  # a wrong prefix shows in the logits only
    assert (wrong.values[:, :-1] != found.values[:, :-1]).all()


def test_a_state_can_be_continued_and_stands_for_the_whole_prefix() -> None:
    tokens = some_prompts(1)[0]
    whole = lm.states(tokens)
    assert np.array_equal(lm.states(tokens[15:], start=15, before=int(whole[15])), whole[15:])
    swapped = tokens.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert lm.states(swapped)[-1] != whole[-1]


def test_replies_are_as_long_as_the_words_ones_on_average() -> None:
    contexts = some_contexts(100_000)
    found = lm.logits(contexts)
    for sampling, within in ((Sampling(seed=1), 0.1), (Sampling(1.0, 0.95, seed=1), 0.1), (Sampling(0.0), 0.25)):
        ends = lm.sample(found, contexts.position, sampling) == language.EOS
        assert 1 / ends.mean() == pytest.approx(language.MEAN_REPLY, rel=within)


# --- sampling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 0), (2.0, 1.0, 0), (1.0, 0.95, 0), (1.5, 0.8, 4)]
)
def test_tokens_come_as_often_as_their_probabilities_say(temperature: float, top_p: float, top_k: int) -> None:
    draws = 10_000
    found = lm.logits(some_contexts(3, seed=4))
    for index in range(3):
        one = row(found, index, draws)
        sampling = Sampling(temperature, top_p, top_k, seed=np.arange(draws))
        tokens = lm.sample(one, np.full(draws, 9), sampling)
        heated = lm.values_of(row(found, index), VOCABULARY[None, :])[0] / temperature
        expected = np.exp(heated - heated.max())
        order = np.argsort(-expected, kind="stable")
        if top_k:
            expected[order[top_k:]] = 0
        expected /= expected.sum()
        if top_p < 1:
            held = expected[order].cumsum() - expected[order]
            expected[order[held >= top_p]] = 0
            expected /= expected.sum()
        counts = np.bincount(tokens, minlength=language.VOCAB_SIZE)
        assert not counts[expected == 0].any()
        often = expected * draws >= 5
        seen = np.append(counts[often], counts[~often].sum())
        due = np.append(expected[often], expected[~often].sum()) * draws
        if due[-1] < 5:
            assert seen[-1] <= due[-1] + 15
            seen, due = seen[:-1], due[:-1] / due[:-1].sum() * seen[:-1].sum()
        if len(due) > 1:
            assert stats.chisquare(seen, due).pvalue > 1e-4


def test_temperature_zero_takes_the_most_likely_token() -> None:
    contexts = some_contexts(3_000)
    found = lm.logits(contexts)
    tokens = lm.sample(found, contexts.position, Sampling(temperature=0.0, seed=np.arange(3_000)))
    assert (lm.score(found, tokens).ranks == 1).all()
    mixed_batch = lm.sample(found, contexts.position, Sampling(temperature=np.arange(3_000) % 2))
    assert np.array_equal(mixed_batch[::2], tokens[::2])
    assert not np.array_equal(mixed_batch[1::2], tokens[1::2])


def test_eos_is_not_drawn_before_it_may_be() -> None:
    contexts = some_contexts(20_000)
    found = lm.logits(contexts)
    free = lm.sample(found, contexts.position, Sampling(seed=1))
    held = lm.sample(found, contexts.position, Sampling(seed=1, may_end=False))
    assert (free == language.EOS).any()
    assert not (held == language.EOS).any()
    assert np.array_equal(free[free != language.EOS], held[free != language.EOS])


# --- free and forced --------------------------------------------------------------------------------------------------


def test_the_same_seed_says_the_same_whatever_the_batch() -> None:
    prompts = some_prompts(9)
    sampling = Sampling(1.0, 0.95, 0, np.arange(9))
    together_ = generate(prompts, 60, sampling, top=20)
    start = 0
    for index, prompt in enumerate(prompts):
        alone = generate([prompt], 60, sampling._replace(seed=index), top=20)
        length = int(alone.lengths[0])
        assert np.array_equal(alone.ids[0], together_.ids[index])
        part = [field[start : start + length] for field in together_.scores]
        assert all(map(np.array_equal, alone.scores, part))
        start += length
    other = generate(prompts, 60, sampling._replace(seed=np.arange(9) + 1))
    assert not np.array_equal(other.ids, together_.ids)


@pytest.mark.parametrize("active", [{}, {"kv-beyond": 60.0, "bf16-noise": 0.02, "race": 0.1, "flip-token": 0.1}])
def test_a_replay_gives_the_scores_of_the_free_run_faults_included(active: dict[str, float]) -> None:
    prompts, faulty = some_prompts(20), Faulty(active, 3)
    free = generate(prompts, 400, Sampling(seed=np.arange(20)), faulty=faulty, top=20)
    assert len(set(free.lengths.tolist())) > 5
    forced = replay(prompts, free.replies(), faulty=faulty, top=20)
    assert all(map(np.array_equal, free.scores, forced))


# --- faults -----------------------------------------------------------------------------------------------------------

REPLY = 300
ROWS = 40
POSITION = np.tile(np.arange(REPLY), ROWS)  # of the token in its reply
ROW = np.repeat(np.arange(ROWS), REPLY)
DECODED = POSITION > 0


@pytest.fixture(scope="module")
def sound() -> tuple[list[Any], list[Any], lm.Scores]:
    prompts = some_prompts(ROWS)
    run = generate(prompts, REPLY, Sampling(seed=np.arange(ROWS)), ignore_eos=True, top=20)
    return prompts, run.replies(), run.scores


def spoiled(sound: Any, name: str, number: float = 1.0, seed: int = 0, **place: Any) -> lm.Scores:
    return replay(sound[0], sound[1], faulty=Faulty({name: number}, seed), place=together(ROWS, **place), top=20)


def test_what_reads_a_wrong_prefix_strikes_where_it_says(sound: Any) -> None:
    same_but_for(sound[2], spoiled(sound, "kv-beyond", 100), (POSITION + 40 > 100) & DECODED)
    cached = np.where(np.arange(ROWS) % 3 == 0, 16, 0)
    same_but_for(sound[2], spoiled(sound, "prefix-off-by-one", cached=cached), ROW % 3 == 0)
    for batch, hit in ((1, 0), (2, 0), (3, 1), (4, 0), (5, 1), (9, 1), (16, 0), (17, 1), (24, 0), (33, 1), (64, 0)):
        if hit:
            same_but_for(sound[2], spoiled(sound, "padded-batch", batch=batch), DECODED)
        else:
            assert all(map(np.array_equal, sound[2], spoiled(sound, "padded-batch", batch=batch)))


def test_one_row_of_a_step_is_struck(sound: Any) -> None:
    every = spoiled(sound, "batch-corrupts", 39)
    struck = differs(every, sound[2])
    assert np.array_equal(np.bincount(POSITION[struck], minlength=REPLY), DECODED[:REPLY])  # each step, one row
    assert all(map(np.array_equal, sound[2], spoiled(sound, "batch-corrupts", 40)))
    race = differs(spoiled(sound, "race", 0.2), sound[2])
    assert np.bincount(POSITION[race]).max() == 1
    assert race.sum() == pytest.approx(0.2 * REPLY, rel=0.4)
    leaks = differs(spoiled(sound, "neighbour-leak", joined=True), sound[2])
    assert np.bincount(POSITION[leaks]).max() == 1
    assert leaks.sum() == REPLY - 1
    assert all(map(np.array_equal, sound[2], spoiled(sound, "neighbour-leak")))


def test_a_corrupted_step_changes_ids_and_logprobs_together(sound: Any) -> None:
    flipped = spoiled(sound, "flip-token", 0.05)
    struck = differs(flipped, sound[2])
    assert struck.mean() == pytest.approx(0.05, rel=0.2)
    assert (flipped.top_ids[:, 0] != sound[2].top_ids[:, 0])[struck].mean() > 0.9
    assert not np.array_equal(struck, differs(spoiled(sound, "flip-token", 0.05, seed=1), sound[2]))


@pytest.mark.parametrize("name", ["low-precision", "bf16-noise", "batch-noise", "state-drift"])
def test_noise_is_of_its_size_and_unbiased(sound: Any, name: str) -> None:
    noisy = spoiled(sound, name, 0.02)
    gap = [scores.top_logprobs[:, 0] - scores.top_logprobs[:, 1] for scores in (sound[2], noisy)]
    change = (gap[1] - gap[0])[DECODED & (gap[0] > 0.5)]
    if name == "state-drift":
        late = np.abs(change[POSITION[DECODED & (gap[0] > 0.5)] > 250])
        assert late.mean() > 3 * np.abs(change[POSITION[DECODED & (gap[0] > 0.5)] < 60]).mean()
        assert late.max() < 0.3 * 0.02 * 7  # two tokens, up to 3.5 standard deviations each
    else:
        assert change.std() == pytest.approx(0.02 * 2**0.5, rel=0.05)
        assert change.mean() == pytest.approx(0, abs=0.001)
    other_batch = spoiled(sound, name, 0.02, batch=8)
    assert np.array_equal(other_batch.logprobs, noisy.logprobs) == (name != "batch-noise")
    assert not np.array_equal(spoiled(sound, name, 0.02, seed=1).logprobs, noisy.logprobs)


def test_harmless_noise_is_as_small_as_bf16s(sound: Any) -> None:
    noisy = spoiled(sound, "bf16-noise", 0.02)
    p, q = np.exp(sound[2].top_logprobs.astype(float)), noisy.top_logprobs.astype(float)
    same = (noisy.top_ids == sound[2].top_ids).all(axis=1)
    divergence = (p * (np.log(p) - q)).sum(axis=1)[same]
    assert 5e-6 < divergence.mean() < 2e-4
    assert (noisy.top_ids[:, 0] != sound[2].top_ids[:, 0]).mean() < 0.005


def test_the_odds_of_the_end_are_scaled_and_nothing_else(sound: Any) -> None:
    contexts = some_contexts(500)
    place = Place(decoded=1)
    plain, scaled = (decoding.logits(contexts, place, Faulty(on)) for on in ({}, {"eos-scaled": 2.0}))
    assert scaled.values[:, -1] - plain.values[:, -1] == pytest.approx(np.log(2))
    assert np.array_equal(scaled.values[:, :-1], plain.values[:, :-1])
    lengths = [
        generate(sound[0], 3_000, Sampling(seed=np.arange(ROWS)), faulty=Faulty({"eos-scaled": factor})).lengths
        for factor in (0.5, 1, 2)
    ]
    assert (lengths[0] >= lengths[1]).all()
    assert (lengths[1] >= lengths[2]).all()
    assert lengths[0].sum() > 1.1 * lengths[1].sum() > 1.2 * lengths[2].sum()


def test_replies_repeat_themselves_after_as_many_tokens_as_told(sound: Any) -> None:
    run = generate(sound[0], 200, Sampling(seed=np.arange(ROWS)), faulty=Faulty({"repeat-after": 100}), ignore_eos=True)
    plain = np.array([reply[:100] for reply in sound[1]])
    assert np.array_equal(run.ids[:, :100], plain)
    assert np.array_equal(run.ids[:, 100:103], run.ids[:, 97:100])
    assert np.array_equal(run.ids[:, 103:], run.ids[:, 100:-3])
    changed = spoiled(sound, "repeat-after", 100)
    assert np.array_equal((changed.logprobs != sound[2].logprobs), POSITION >= 100)


def test_some_requests_compute_what_is_not_a_number(sound: Any) -> None:
    faulty = Faulty({"nan-zero": 0.2})
    run = generate(sound[0], 50, Sampling(seed=np.arange(ROWS)), faulty=faulty, ignore_eos=True)
    broken = (run.ids[:, 1:] == lm.BROKEN).all(axis=1)
    assert 2 <= broken.sum() <= 16
    assert language.TOKENS[lm.BROKEN] == "!"
    plain = np.array([reply[:50] for reply in sound[1]])
    assert np.array_equal(run.ids[~broken], plain[~broken])
    scores = spoiled(sound, "nan-zero", 0.2)
    assert np.array_equal(np.isnan(scores.logprobs), broken[ROW] & DECODED)
    assert np.array_equal(scores.ranks == 0, broken[ROW] & DECODED)


def test_sampling_faults_ignore_what_was_asked(sound: Any) -> None:
    def said(on: dict[str, float], sampling: Sampling, seed: int = 0, rows: int = ROWS) -> Any:
        run = generate(sound[0][:rows], 100, sampling, faulty=Faulty(on, seed), ignore_eos=True)
        return run.ids.tolist()

    asked = Sampling(1.0, 0.9, 0, np.arange(ROWS))
    assert said({"ignore-temperature": 1}, asked) == said({}, asked._replace(temperature=0.0)) != said({}, asked)
    assert said({"ignore-top-p": 1}, asked) == said({}, asked._replace(top_p=1.0)) != said({}, asked)
    assert said({"shared-seed": 1}, asked) == said({}, asked._replace(seed=0)) != said({}, asked)
    twice = [said({"ignore-seed": 1}, asked, seed) for seed in (0, 1)]
    assert twice[0] != twice[1]
    same = [sound[0][0]] * 4
    places = together(4)
    own = generate(same, 50, Sampling(seed=7), faulty=Faulty({"ignore-seed": 1}), place=places, ignore_eos=True)
    assert len(set(map(tuple, own.ids.tolist()))) == 4
    one = generate(same, 50, Sampling(seed=np.arange(4)), faulty=Faulty({"shared-seed": 1}), ignore_eos=True)
    assert len(set(map(tuple, one.ids.tolist()))) == 1


def test_every_fault_of_the_decode_path_does_something(sound: Any) -> None:
    numbers = {"kv-beyond": 50.0, "batch-corrupts": 4.0, "repeat-after": 20.0, "eos-scaled": 3.0, "state-drift": 5.0}
    place = together(ROWS, batch=9, row=np.arange(ROWS) % 9, cached=16, joined=True)
    asked = Sampling(1.0, 0.9, 0, np.arange(ROWS))
    plain = generate(sound[0], 100, asked, place=place)
    for name in faults.DECODE_FAULTS:
        run = generate(sound[0], 100, asked, place=place, faulty=Faulty({name: numbers.get(name, 0.5)}))
        assert not np.array_equal(run.scores.logprobs, plain.scores.logprobs), name


# --- in the step loop -------------------------------------------------------------------------------------------------


def spoken(*on: str) -> list[list[float]]:
    """Logprobs of three requests of 20 tokens that come to a server 6 steps apart, with faults on."""
    scheduler = Scheduler(EmulatorSettings(language="model", faults=on))
    waiting, sequences = some_prompts(3), []
    for step in range(100):
        if step % 6 == 0 and waiting:
            prompt = waiting.pop(0).astype(np.int32)
            last, position, state = speech.context_of(prompt)
            voice = speech.Voice(
                last=last, position=position, state=state, request=0, temperature=0, top_p=1, top_k=0, seed=0, scored=0
            )
            sequences.append(Sequence(prompt, limit=20, voice=voice))
            scheduler.add(sequences[-1])
        begun = scheduler.begin()
        if begun is not None:
            scheduler.end(begun)
    assert all(sequence.finish == "length" for sequence in sequences)
    return [[score.logprob for score in sequence.voice.scores] for sequence in sequences if sequence.voice is not None]


def test_the_step_loop_tells_faults_the_batch_and_who_joined() -> None:
    # A request's first token comes with its prompt, at step 0, 6 or 12; three rows decode from step 13 on.
    sound, padded, leaking = spoken(), spoken("padded-batch"), spoken("neighbour-leak")
    struck = [[a != b for a, b in zip(sound[row], padded[row], strict=True)] for row in range(3)]
    assert struck[0][:14] == [False] * 13 + [True]
    assert struck[1][:8] == [False] * 7 + [True]
    # Greedy replies go on from a wrong token: the first strike is told apart from what follows from it.
    struck = [[a != b for a, b in zip(sound[row], leaking[row], strict=True)] for row in range(3)]
    assert min(6 * row + place for row in range(3) for place, hit in enumerate(struck[row]) if hit) == 1

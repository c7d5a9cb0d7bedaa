"""The prefix cache against a plain model of what it should hold."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.emulator.prefix_cache import PrefixCache, block_hashes


def chain(*names: str) -> list[bytes]:
    """Hashes of a prompt: each stands for its block and all before it."""
    return ["/".join(names[: end + 1]).encode() for end in range(len(names))]


def run(cache: PrefixCache, prompt: list[bytes], extra: int = 0) -> int | None:
    """One request from start to end; returns the hits, or None if there was no room."""
    hits = cache.hits(prompt)
    if not cache.allocate(prompt[:hits], len(prompt) - hits + extra):
        return None
    for block in prompt[hits:]:
        cache.publish(block)
    cache.release(prompt, extra)
    return hits


def test_the_longest_unused_goes_first_and_an_end_before_its_start() -> None:
    cache = PrefixCache(5)
    assert run(cache, chain("a", "b", "c")) == 0
    assert run(cache, chain("x", "y")) == 0  # full: a/b/c, x/y
    assert run(cache, chain("a")) == 1  # a is now the newest
    assert run(cache, chain("q", "r")) == 0  # needs two: a/b/c, then a/b go
    assert cache.hits(chain("a", "b", "c")) == 1
    assert cache.hits(chain("x", "y")) == 2
    assert run(cache, chain("s")) == 0  # next is x/y
    assert cache.hits(chain("x", "y")) == 1


def test_blocks_in_use_are_never_evicted_and_shared_ones_count_once() -> None:
    cache = PrefixCache(4)
    prompt = chain("a", "b")
    assert cache.allocate([], 2)
    for block in prompt:
        cache.publish(block)
    assert cache.allocate(prompt, 1)  # a second request on the same two blocks
    assert cache.used == 3
    assert not cache.allocate([], 2)  # one is free
    assert cache.used == 3
    cache.release(prompt, 0)
    assert cache.used == 3  # the second request still holds them
    cache.release(prompt, 1)
    assert (cache.used, cache.hits(prompt)) == (0, 2)


def test_two_requests_that_compute_the_same_content_end_with_one_copy() -> None:
    cache = PrefixCache(4)
    assert cache.allocate([], 1)
    assert cache.allocate([], 1)
    cache.publish(b"a")
    cache.publish(b"a")
    assert (cache.used, cache.held) == (1, {b"a": 2})


Prompts = st.lists(st.sampled_from("abc"), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(st.integers(4, 9), st.lists(st.tuples(Prompts, st.integers(0, 2)), max_size=30))
def test_one_at_a_time_it_is_an_lru_of_prompts_read_from_their_end(
    capacity: int, requests: list[tuple[list[str], int]]
) -> None:
    cache = PrefixCache(capacity)
    model: list[bytes] = []  # cached blocks, the longest unused first
    for names, extra in requests:
        prompt = chain(*names)
        hits = 0
        while hits < len(prompt) and prompt[hits] in model:
            hits += 1
        got = run(cache, prompt, extra)
        if len(prompt) + extra > capacity:
            assert got is None
            continue
        assert got == hits
        others = [block for block in model if block not in prompt]
        room = capacity - len(prompt) - extra
        model = others[max(0, len(others) - room) :] + prompt[::-1]
        assert list(cache.idle) == model
        assert cache.used == 0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_with_overlapping_requests_counts_stay_sound_and_prefixes_stay_whole(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(3, 8))
    cache = PrefixCache(capacity)
    active: list[tuple[list[bytes], int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if active and data.draw(st.booleans()):
            cache.release(*active.pop(data.draw(st.integers(0, len(active) - 1))))
        else:
            prompt, extra = chain(*data.draw(Prompts)), data.draw(st.integers(0, 2))
            hits = cache.hits(prompt)
            if cache.allocate(prompt[:hits], len(prompt) - hits + extra):
                for block in prompt[hits:]:
                    cache.publish(block)
                active.append((prompt, extra))
        wanted = {block for prompt, _ in active for block in prompt}
        assert set(cache.held) == wanted
        assert all(cache.held[block] == sum(block in prompt for prompt, _ in active) for block in wanted)
        assert cache.private == sum(extra for _, extra in active)
        assert cache.used + len(cache.idle) <= capacity
        assert not wanted & set(cache.idle)
        cached = wanted | set(cache.idle)
        assert all(block.rpartition(b"/")[0] in cached for block in cached if b"/" in block)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=70), st.integers(1, 16), st.data())
def test_a_hash_stands_for_a_block_and_all_before_it(tokens: list[int], size: int, data: st.DataObject) -> None:
    prompt = np.array(tokens, np.int32)
    hashes = block_hashes(prompt, size)
    assert len(hashes) == len(tokens) // size
    assert block_hashes(prompt[: len(prompt) // size * size], size) == hashes
    if hashes:
        place = data.draw(st.integers(0, len(hashes) * size - 1))
        changed = prompt.copy()
        changed[place] ^= 1
        other = block_hashes(changed, size)
        assert other[: place // size] == hashes[: place // size]
        assert all(a != b for a, b in zip(other[place // size :], hashes[place // size :], strict=True))

"""The repeating layer is found exactly, whatever else runs between, beside and within it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reports.kernels.layers import Layers, layers
from tests.reports.kernels.traces import Kernel, Run, as_read, model
from workloads.errors import UserError

HEAD = [Kernel("embedding", 0, 1), Kernel("metadata", 2, 1), Kernel("norm", 2, 1)]
TAIL = [Kernel("norm", 0, 1), Kernel("gemm", 2, 5), Kernel("argmax", 7, 1)]
ATTENTION = [Kernel("norm", 0, 1), Kernel("gemm", 2, 3), Kernel("attention", 4, 6), Kernel("gemm", 7, 3)]
RECURRENT = [*ATTENTION[:2], Kernel("conv", 4, 2), Kernel("delta", 3, 2), Kernel("gemm", 3, 3)]
EXPERTS = [Kernel("norm", 4, 1), Kernel("router", 2, 1), Kernel("moe", 2, 9), Kernel("moe", 10, 8)]
LAYER_US = 50.0
BUSY_US = 1 + 3 + 6 + 3 + 1 + 1 + 9 + 8


def found(step_layers: list[list[Kernel]], known: int | None = None, **options: float) -> Layers:
    settings_ = {"steps": 8, **options}
    return layers(
        as_read(model(step_layers, head=HEAD, tail=TAIL, layer_us=LAYER_US, **settings_)),  # type: ignore[arg-type]
        known,
    )


def test_a_uniform_model() -> None:
    result = found([ATTENTION + EXPERTS] * 32, known=32)
    assert (result.kernels, result.copies, result.layers_per_unit, result.units_per_step) == (8, 0, 1, 32)
    assert result.steps == 7
    assert result.repetitions == 8 * 32
    assert result.wall.median == pytest.approx(LAYER_US)
    assert result.busy.median == pytest.approx(BUSY_US)
    assert result.gap.median == pytest.approx(LAYER_US - BUSY_US)
    assert result.overlap.median == pytest.approx(0, abs=1e-9)
    assert result.step is not None
    assert result.step.median == pytest.approx(34 * LAYER_US)
    assert result.outside_us == pytest.approx(2 * LAYER_US)
    assert [(kernel.name, kernel.count) for kernel in result.top[:3]] == [("moe", 2), ("attention", 1), ("gemm", 2)]
    assert [kernel.us for kernel in result.top[:3]] == pytest.approx([17, 6, 6])
    assert sum(kernel.share for kernel in result.top) == pytest.approx(1)
    assert [span.kernel for span in result.timeline] == [kernel.name for kernel in ATTENTION + EXPERTS]
    assert result.notes == []


def test_a_layer_of_one_kernel_repeated_with_copies_beside_it() -> None:
    """What repeats within the layer covers more than the layer does, as long as the copies are counted."""
    layer = [Kernel("own", 0, 1), *[Kernel("same", 2, 1)] * 6, Kernel("same", 2, 3, 8)]
    for seed in range(5):
        result = found([layer] * 6, known=6, beside=1, seed=seed)
        assert (result.kernels_per_unit, result.copies, result.units_per_step) == (8, 0, 6)


def test_units_do_not_overlap() -> None:
    """Without its second stream the layer looks like two halves that share a kernel."""
    layer = [Kernel(name, 2, 3, 8) for name in ("a", "b", "a", "b")] + [Kernel("own", 2, 1), Kernel("b", 2, 3, 8)]
    result = found([layer] * 6, known=6)
    assert (result.kernels_per_unit, result.units_per_step) == (6, 6)
    assert result.covered < 1


@pytest.mark.parametrize("number", [2, 3, 5])
def test_few_layers(number: int) -> None:
    """Such as a drafter's, or a tiny model's: the step is mostly outside."""
    result = found([ATTENTION + EXPERTS] * number, known=number)
    assert (result.kernels, result.units_per_step) == (8, number)


@pytest.mark.parametrize(("recurrent", "times", "last"), [(3, 23, 1), (7, 4, 0), (1, 16, 0)])
def test_a_hybrid_model_has_a_unit_of_several_layers(recurrent: int, times: int, last: int) -> None:
    """Kimi K3's 93 layers are 69 recurrent ones and 24 with attention."""
    unit = [RECURRENT + EXPERTS] * recurrent + [ATTENTION + EXPERTS]
    number = (recurrent + 1) * times + last
    result = found(unit * times + [ATTENTION + EXPERTS] * last, known=number)
    assert (result.layers_per_unit, result.units_per_step) == (recurrent + 1, times)
    assert result.kernels_per_unit == 9 * recurrent + 8
    assert result.kernels == pytest.approx((9 * recurrent + 8) / (recurrent + 1))
    assert result.wall.median == pytest.approx(LAYER_US)
    assert bool(result.notes) == bool(last)


def test_dense_first_layers_are_outside_and_said() -> None:
    dense = [*ATTENTION, Kernel("norm", 4, 1), Kernel("gemm", 2, 9), Kernel("silu", 10, 1), Kernel("gemm", 2, 4)]
    result = found([dense] * 3 + [ATTENTION + EXPERTS] * 58, known=61)
    assert (result.kernels, result.units_per_step, result.layers_per_unit) == (8, 58, 1)
    assert "58 of the model's 61 layers" in result.notes[0]


def test_kernels_on_two_streams_overlap_and_swap() -> None:
    """The shared expert runs beside the routed ones, now started before them, now after."""
    early = [*ATTENTION, *EXPERTS[:2], Kernel("shared", 1.9, 4, 8), Kernel("moe", 0.1, 9), Kernel("moe", 10, 8)]
    late = [*ATTENTION, *EXPERTS[:2], Kernel("moe", 2, 9), Kernel("shared", 0.1, 4, 8), Kernel("moe", 9.9, 8)]
    result = found([early, late, late, early, late] * 6, known=30)
    assert (result.kernels, result.streams, result.units_per_step) == (9, 2, 30)
    assert result.wall.median == pytest.approx(LAYER_US)
    assert result.overlap.median == pytest.approx(4, abs=0.2)
    assert result.busy.median == pytest.approx(BUSY_US, abs=0.2)


def test_a_kernel_that_reaches_into_the_next_layer_is_not_counted_twice() -> None:
    """Programmatic dependent launch: a kernel starts before the one ahead of it has ended."""
    layer = [Kernel("norm", 0, 10), Kernel("gemm", 9, 30), Kernel("moe", 29, 16)]
    result = layers(as_read(model([layer] * 20, steps=5, head=HEAD, tail=TAIL, layer_us=52.0)), 20)
    assert result.wall.median == pytest.approx(52)
    assert result.busy.median == pytest.approx(52)
    assert result.gap.median == pytest.approx(0)
    assert result.overlap.median == pytest.approx(10 + 30 + 16 - 52)


def test_copies_that_run_beside_a_layer_do_not_hide_it() -> None:
    result = found([ATTENTION + EXPERTS] * 32, known=32, beside=3)
    assert (result.kernels, result.copies, result.units_per_step, result.repetitions) == (8, 0, 32, 8 * 32)
    assert result.notes == []


def test_one_gpu_of_several() -> None:
    runs = model([ATTENTION + EXPERTS] * 8, steps=5, head=HEAD, tail=TAIL, layer_us=LAYER_US)
    activity = as_read(runs, gpus=("small", "large"))
    activity.device[:] = 1
    activity.device[:3] = 0
    result = layers(activity)
    assert (result.gpu, result.device, result.kernels) == ("large", 1, 8)
    assert "not known" in result.notes[0]


def test_nothing_repeats() -> None:
    runs = [Run(f"kernel {number}", number * 10.0, 5.0) for number in range(500)]
    with pytest.raises(UserError, match="no layer repeats"):
        layers(as_read(runs))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_known_layers_are_found(data: st.DataObject) -> None:
    """Any layer that has a kernel of its own; jitter; copies at random; a second stream; kernels outside."""
    shared = [f"k{number}" for number in range(4)]
    names = data.draw(st.lists(st.sampled_from(shared), min_size=3, max_size=16))
    names.insert(data.draw(st.integers(0, len(names))), "own")
    second = data.draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    layer = [
        Kernel(name, 0 if index == 0 else 2.0, 3.0 if aside else 1.5, 8 if aside else 7)
        for index, (name, aside) in enumerate(zip(names, second, strict=True))
    ]
    outside = data.draw(st.lists(st.sampled_from([*shared, "logits"]), max_size=5, unique=True))
    head = [Kernel("embedding", 0, 1), Kernel("first", 2, 1)]
    tail = [*(Kernel(name, 0 if index == 0 else 1, 0.5) for index, name in enumerate(outside)), Kernel("argmax", 1, 1)]
    number, steps = data.draw(st.integers(6, 40)), data.draw(st.integers(7, 12))
    runs = model(
        [layer] * number, steps=steps, head=head, tail=tail, layer_us=LAYER_US,
        jitter=data.draw(st.sampled_from([0.0, 0.3])), odd=data.draw(st.sampled_from([0.0, 0.02])),
        beside=data.draw(st.integers(0, 2)), seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    result = layers(as_read(runs), number)
    assert (result.kernels_per_unit, result.copies, result.layers_per_unit) == (len(layer), 0, 1)
    assert result.units_per_step == number
    assert result.wall.median == pytest.approx(LAYER_US, abs=0.01)
    assert result.busy.median + result.gap.median == pytest.approx(result.wall.median, abs=0.2)
    assert result.steps == steps - 1

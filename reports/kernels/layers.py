"""The layer that repeats in a model's decode steps, found in the order of kernels alone.

Under CUDA graphs a trace has no names of operators: kernels follow each other, step after step. What is found:

* **Steps** by a kernel that runs once in each (the sampler's, say): among kernels that come back at equal distances,
  those that are away longest.
* **Odd kernels**, which do not run equally often in every step (a copy now and then), are left out of what follows,
  and so are streams that most units run nothing on.
* **The unit** by an anchor, a kernel that runs once in each layer. Between an anchor and the next lies one unit: as
  many of each kernel, whatever their order (two streams may swap it) every time. Every kernel of the trace is tried as
  the anchor; that between anchors which is found most often is its unit, and the smallest unit is taken that covers
  nearly as many kernels as any other. So the layers of a uniform model are one unit each, and a model that has an
  attention layer after every three recurrent ones has a unit of four.
* **Where a unit starts**: around a row of units that anchors enclose, kernels before the first anchor and behind the
  last make up one more.

Of a unit: wall is the time from its start to the start of the next one; busy the part of it in which a kernel runs, on
any stream; gap = wall - busy; overlap = sum of durations - busy. Medians over all repetitions. The last unit of a step
has no next one, and no wall.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import numpy.typing as npt

from reports.kernels.kineto import Activity, display_name
from workloads.errors import UserError

_EVEN = 0.1  # a spacing within this share of the median is even
_MOSTLY = 0.8  # share of steps, or spacings, that must agree
_NO_CHANCE = 6  # places that do not lie evenly by chance
_FEWEST = 3  # steps, and repetitions of a unit
_NEARLY = 0.97  # of the best coverage
_USED = 0.5  # share of units that run something on a stream of theirs
_LEAST_COVERAGE = 0.4  # of kernels; below this, what repeats is not the model

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Spread(msgspec.Struct, frozen=True):
    """Median and quartiles over repetitions."""

    median: float
    lower: float
    upper: float
    n: int


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel (or kind of copy) in a layer."""

    name: str
    display: str
    count: float
    """A layer."""
    us: float
    """A layer, sum of its durations, median."""
    share: float
    """Of the sum of all durations."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a kernel in the unit that is drawn."""

    kernel: str
    name: str
    stream: int
    start_us: float
    """From the unit's start."""
    end_us: float


class Layers(msgspec.Struct, frozen=True, kw_only=True):
    """The repeating layer of one trace. Times in µs; "a layer": a unit's divided by ``layers_per_unit``."""

    gpu: str | None
    device: int
    streams: int
    kernels_in_trace: int
    covered: float
    """Share of the device's kernels, copies and fills that are in complete units."""
    steps: int | None
    """Null if no kernel marks steps."""
    units_per_step: float | None
    """Mean over steps."""
    layers_per_unit: int
    repetitions: int
    """Complete units."""
    kernels_per_unit: int
    kernels: float
    """A layer."""
    copies: float
    """Copies and fills a layer."""
    wall: Spread
    busy: Spread
    gap: Spread
    overlap: Spread
    step: Spread | None
    """Start of a step to start of the next."""
    outside_us: float | None
    """Of a step, outside its units."""
    top: list[Kernel]
    """All kernels of a layer, the longest first."""
    timeline: list[Span]
    """Of the unit whose wall is nearest to the median."""
    notes: list[str]


class _Unit(msgspec.Struct, frozen=True):
    """Where units are: at ``starts``, indices into a sequence, ``size`` elements each."""

    starts: Ints
    size: int
    coverage: float


def layers(activity: Activity, model_layers: int | None = None) -> Layers:
    """Find the repeating layer on the busiest device. ``model_layers``: of the whole model, if known; without it a unit
    is taken for one layer. Raises UserError if nothing repeats."""
    on_device = activity.on(activity.busiest_device)
    names = on_device.name
    marks = _step_marks(names)
    kept = _regular(names, marks)
    unit, kept = _find_unit(on_device, kept, marks)
    members = _members(unit, kept)
    units_per_step = _units_per_step(members[:, 0], marks)
    in_unit, notes = _layers_per_unit(model_layers, units_per_step)
    adjoins = np.flatnonzero(np.diff(unit.starts) == unit.size)
    return _measure(on_device, members, adjoins, marks, units_per_step, in_unit, notes)


def _members(unit: _Unit, kept: Ints) -> Ints:
    """Shape (units, size): indices of each unit's activity."""
    return np.asarray(kept[unit.starts[:, None] + np.arange(unit.size)])


def _find_unit(on: Activity, kept: Ints, marks: Ints) -> tuple[_Unit, Ints]:
    """The unit, and the indices of activity that its starts count in: only those of the streams that it uses, since a
    step's result may be copied on another one while the next step begins. Raises UserError if nothing repeats."""
    by_streams: dict[tuple[int, ...], Ints] = {}
    for unit in _units(on.name[kept], np.searchsorted(kept, marks)):
        streams = on.stream[_members(unit, kept)]
        used = tuple(int(each) for each in np.unique(streams) if (streams == each).any(axis=1).mean() > _USED)
        by_streams[used] = kept[np.isin(on.stream[kept], used)]
    found = [
        (unit, narrowed, unit.coverage * len(narrowed) / len(kept))
        for narrowed in by_streams.values()
        for unit in _units(on.name[narrowed], np.searchsorted(narrowed, marks))
    ]
    best = max((coverage for *_, coverage in found), default=0.0)
    if best < _LEAST_COVERAGE:
        raise UserError(
            f"{on.path}: no layer repeats among its {len(on.name):,} kernels and copies. Profile more steps of pure "
            "decoding (no prefill in between), with a batch that does not change"
        )
    good = [each for each in found if each[2] >= _NEARLY * best]
    unit, narrowed, _ = min(good, key=lambda each: (each[0].size, -each[2]))
    return unit, narrowed


def _step_marks(names: npt.NDArray[np.int32]) -> Ints:
    """Indices of a kernel that runs once a step; empty if there is none."""
    found: list[tuple[float, Ints]] = []
    for places in _by_name(names):
        if len(places) < _FEWEST:
            continue
        spacings = np.diff(places)
        middle = float(np.median(spacings))
        even = float(np.mean(np.abs(spacings - middle) <= _EVEN * middle)) >= _MOSTLY
        if even and middle * (len(places) + 1) >= _MOSTLY * len(names):
            found.append((middle, places))
    found.sort(key=lambda each: -each[0])
    # a few odd kernels may lie evenly by chance; not many, nor two that are equally far apart
    none = np.empty(0, dtype=np.int64)
    for (middle, places), (below, _) in itertools.pairwise([*found, (0.0, none)]):
        if len(places) >= _NO_CHANCE or below >= (1 - _EVEN) * middle:
            return places
    return none


def _regular(names: npt.NDArray[np.int32], marks: Ints) -> Ints:
    """Indices of all but odd kernels."""
    if len(marks) < _FEWEST:
        return np.arange(len(names))
    steps, kinds = len(marks) - 1, int(names.max()) + 1
    step = np.repeat(np.arange(steps), np.diff(marks))
    counts = np.bincount(step * kinds + names[marks[0] : marks[-1]], minlength=steps * kinds).reshape(steps, kinds)
    usual = np.median(counts, axis=0)
    kept = (usual > 0) & ((counts == usual).mean(axis=0) >= _MOSTLY)
    return np.flatnonzero(kept[names])


def _units(names: npt.NDArray[np.int32], marks: Ints) -> list[_Unit]:
    """What each kernel's name, as the anchor, gives; units that repeat within steps only."""
    if not len(names):
        return []
    # the sum of random numbers, one a name, stands for a multiset of names
    number = np.random.default_rng(0).integers(0, 2**63, int(names.max()) + 1, dtype=np.uint64)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(number[names], dtype=np.uint64)])
    marked = np.searchsorted(marks, np.arange(len(names) + 1))  # steps that began before each place
    fewest = max(_FEWEST, 1.5 * len(marks))  # a unit is in each step more than once
    return [
        unit
        for places in _by_name(names)
        if (unit := _unit_of(places, sums, marked)) is not None and len(unit.starts) >= fewest
    ]


def _unit_of(places: Ints, sums: npt.NDArray[np.uint64], marked: Ints) -> _Unit | None:
    """The unit that one kernel anchors, which is at ``places``."""
    first, end = places[:-1], places[1:]
    within = marked[end] == marked[first]  # no step ends in between
    content = sums[end] - sums[first]
    if not within.any():
        return None
    contents, counts = np.unique(content[within], return_counts=True)
    usual = contents[np.argmax(counts)]
    is_unit = within & (content == usual)
    size = int((end - first)[is_unit][0])
    # rows of units: the first anchor of each, and the anchor behind its last
    edges = np.diff(np.concatenate([[0], is_unit.astype(np.int64), [0]]))
    row_first, row_end = places[np.flatnonzero(edges == 1)], places[np.flatnonzero(edges == -1)]
    ahead = np.arange(size)
    before, behind = row_first[:, None] - ahead, row_end[:, None] + size - ahead
    inside = (before >= 0) & (behind < len(sums))
    before, behind = np.where(inside, before, 0), np.where(inside, behind, 0)
    around = sums[row_first][:, None] - sums[before] + sums[behind] - sums[row_end][:, None]
    completes = inside & (around == usual)
    # the earliest of equal ones: what follows the last layer (a norm, a product) is more like a layer's start than what
    # comes before the first is like its end
    shift = size - 1 - int(np.argmax(completes.sum(axis=0)[::-1]))
    enclosed, around_rows = first[is_unit], row_end[completes[:, shift]]
    following = np.append(enclosed, len(sums) + size)[np.searchsorted(enclosed, around_rows)]
    starts = np.union1d(enclosed, around_rows[following - around_rows >= size]) - shift  # units do not overlap
    starts = starts[(starts >= 0) & (starts + size < len(sums))]
    starts = starts[sums[starts + size] - sums[starts] == usual]
    return _Unit(starts, size, len(starts) * size / (len(sums) - 1)) if len(starts) else None


def _by_name(names: npt.NDArray[np.int32]) -> list[Ints]:
    """Indices of each name, in order of the names."""
    order = np.argsort(names, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(names[order])) + 1)


def _units_per_step(starts: Ints, marks: Ints) -> float | None:
    if len(marks) < _FEWEST:
        return None
    counts, _ = np.histogram(starts, bins=marks)
    return float(np.median(counts))


def _layers_per_unit(model_layers: int | None, units_per_step: float | None) -> tuple[int, list[str]]:
    if model_layers is None:
        return 1, ["the model's number of layers is not known: a repeating unit is taken for one layer"]
    if not units_per_step:
        return 1, ["units lie in no step that is seen: a repeating unit is taken for one layer"]
    if units_per_step > model_layers:
        return 1, [
            f"{units_per_step:g} units repeat in a step, more than the model's {model_layers} layers: a drafter's are "
            "among them, or a layer holds several; a unit is taken for one layer"
        ]
    exact = model_layers / units_per_step
    each = max(1, round(exact))
    notes = []
    if round(each * units_per_step) != model_layers:
        notes.append(
            f"{units_per_step:g} complete units of {each} in a step are {each * units_per_step:g} of the model's "
            f"{model_layers} layers: the others run other kernels (a first or last one that is fused with what lies "
            "beside it, say), and are counted as outside layers"
        )
    return each, notes


def _measure(
    on: Activity,
    members: Ints,
    adjoins: Ints,
    marks: Ints,
    units_per_step: float | None,
    in_unit: int,
    notes: list[str],
) -> Layers:
    """``members``: indices of each unit's activity; ``adjoins``: units that the next one comes straight after."""
    begin = on.start_us[members[:, 0]]
    step_of = np.searchsorted(marks, members[:, 0], side="right")
    follows = adjoins[step_of[adjoins] == step_of[adjoins + 1]]
    if not len(follows):
        raise UserError(f"{on.path}: no two units of {members.shape[1]} kernels follow each other. Profile more steps")
    wall = begin[follows + 1] - begin[follows]
    busy = _busy_until(on, begin[follows + 1]) - _busy_until(on, begin[follows])
    overlap = on.dur_us[members].sum(axis=1)[follows] - busy
    median_wall = float(np.median(wall))
    drawn = members[follows[np.argmin(np.abs(wall - median_wall))]]
    step = np.diff(on.start_us[marks]) if len(marks) >= _FEWEST else None
    step_spread = _spread(step) if step is not None else None
    return Layers(
        gpu=on.gpus[device] if 0 <= (device := int(on.device[0])) < len(on.gpus) else None,
        device=device,
        streams=len(np.unique(on.stream)),
        kernels_in_trace=int(on.kernel.sum()),
        covered=members.size / len(on.name),
        steps=len(marks) - 1 if step is not None else None,
        units_per_step=units_per_step,
        layers_per_unit=in_unit,
        repetitions=len(members),
        kernels_per_unit=int(on.kernel[members[0]].sum()),
        kernels=float(on.kernel[members[0]].sum()) / in_unit,
        copies=float((~on.kernel[members[0]]).sum()) / in_unit,
        wall=_spread(wall / in_unit),
        busy=_spread(busy / in_unit),
        gap=_spread((wall - busy) / in_unit),
        overlap=_spread(overlap / in_unit),
        step=step_spread,
        outside_us=step_spread.median - units_per_step * median_wall
        if step_spread is not None and units_per_step is not None
        else None,
        top=_top(on, members, in_unit),
        timeline=[
            Span(
                kernel=display_name(on.names[on.name[i]]),
                name=on.names[on.name[i]],
                stream=int(on.stream[i]),
                start_us=float(on.start_us[i] - on.start_us[drawn[0]]),
                end_us=float(on.start_us[i] + on.dur_us[i] - on.start_us[drawn[0]]),
            )
            for i in drawn
        ],
        notes=notes,
    )


def _busy_until(on: Activity, moments: Floats) -> Floats:
    """µs before each moment in which anything ran, on any stream."""
    ends = np.maximum.accumulate(on.start_us + on.dur_us)
    free_since = np.concatenate([on.start_us[:1], ends[:-1]])  # when all that started before had ended
    start = np.maximum(on.start_us, free_since)
    gained = np.maximum(ends - start, 0)
    total = np.concatenate([[0.0], np.cumsum(gained)])
    last = np.searchsorted(on.start_us, moments, side="left")  # activity that starts before the moment
    over = np.where(last > 0, np.maximum(ends[np.maximum(last - 1, 0)] - moments, 0), 0)
    return np.asarray(total[last] - over)


def _top(on: Activity, members: Ints, in_unit: int) -> list[Kernel]:
    names, durations = on.name[members], on.dur_us[members]
    whole = durations.sum()
    found = []
    for name in np.unique(names[0]):
        mine = names == name
        found.append(
            Kernel(
                name=on.names[name],
                display=display_name(on.names[name]),
                count=int(mine[0].sum()) / in_unit,
                us=float(np.median(np.where(mine, durations, 0).sum(axis=1))) / in_unit,
                share=float(durations[mine].sum() / whole) if whole else 0.0,
            )
        )
    return sorted(found, key=lambda kernel: (-kernel.us, kernel.name))


def _spread(values: Floats) -> Spread:
    lower, median, upper = np.quantile(values, [0.25, 0.5, 0.75])
    return Spread(float(median), float(lower), float(upper), len(values))

"""ConvGrad's CPU kernel against sums over all positions in float64.

The bounds: a sum of n products in float, in any order, is off by at most n * u times the sum of the products'
magnitudes, u = 2^-24. With small whole numbers every sum is exact, so that bits can be compared.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from native import INVALID_PARAMETER, KernelError, Library, Threads, tensor
from oracle import FLOAT32_ROUNDOFF


class Convolution(ctypes.Structure):
    _fields_ = [
        ("axes", ctypes.c_int32),
        ("strides", ctypes.c_int64 * 3),
        ("dilations", ctypes.c_int64 * 3),
        ("pads", ctypes.c_int64 * 6),
        ("groups", ctypes.c_int64),
    ]


@dataclass(frozen=True)
class Case:
    """x [batch, channels, size...] with w [filters, channels / groups, kernel...]."""

    batch: int
    channels: int
    filters: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    groups: int = 1

    def numbers(self, given: tuple[int, ...], default: int) -> tuple[int, ...]:
        return given or (default,) * len(self.size)

    def attributes(self) -> Convolution:
        def array(count: int, *numbers: int) -> ctypes.Array:
            return (ctypes.c_int64 * count)(*numbers)

        return Convolution(
            len(self.size),
            array(3, *self.numbers(self.strides, 1)),
            array(3, *self.numbers(self.dilations, 1)),
            array(6, *self.numbers(self.before, 0), *self.numbers(self.behind or self.before, 0)),
            self.groups,
        )

    def arrays(self, whole_numbers: bool) -> dict[str, np.ndarray]:
        """dy, x and w."""
        rng = np.random.default_rng(len(self.size))
        before, behind = self.numbers(self.before, 0), self.numbers(self.behind or self.before, 0)
        reach = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.numbers(self.dilations, 1), strict=True)]
        positions = [
            (n + b + e - r) // s + 1
            for n, b, e, r, s in zip(
                self.size, before, behind, reach, self.numbers(self.strides, 1), strict=True
            )
        ]
        shapes = {
            "dy": (self.batch, self.filters, *positions),
            "x": (self.batch, self.channels, *self.size),
            "w": (self.filters, self.channels // self.groups, *self.kernel),
        }
        if whole_numbers:
            return {name: rng.integers(-2, 3, shape).astype(np.float32) for name, shape in shapes.items()}
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def exact(case: Case, dy: np.ndarray, x: np.ndarray, w: np.ndarray) -> dict[str, np.ndarray]:
    """By one product for each element of the kernel, over all positions at once."""
    dy, x, w = (array.astype(np.float64) for array in (dy, x, w))
    strides, dilations = case.numbers(case.strides, 1), case.numbers(case.dilations, 1)
    before, behind = case.numbers(case.before, 0), case.numbers(case.behind or case.before, 0)
    padded = np.pad(x, [(0, 0), (0, 0), *zip(before, behind, strict=True)])
    dpadded, dw = np.zeros_like(padded), np.zeros_like(w)
    summed = (0, *range(2, dy.ndim))
    channels, filters = w.shape[1], w.shape[0] // case.groups
    for k in itertools.product(*map(range, case.kernel)):
        seen = tuple(
            slice(i * d, i * d + (count - 1) * s + 1, s)
            for i, d, s, count in zip(k, dilations, strides, dy.shape[2:], strict=True)
        )
        for group in range(case.groups):
            c = slice(group * channels, (group + 1) * channels)
            f = slice(group * filters, (group + 1) * filters)
            here = (slice(None), c, *seen)
            dw[(f, slice(None), *k)] = np.tensordot(dy[:, f], padded[here], (summed, summed))
            dpadded[here] += np.moveaxis(np.tensordot(dy[:, f], w[(f, slice(None), *k)], (1, 0)), -1, 1)
    inside = tuple(slice(b, b + n) for b, n in zip(before, case.size, strict=True))
    return {
        "dx": dpadded[(slice(None), slice(None), *inside)],
        "dw": dw,
        "db": dy.sum(axis=summed),
    }


def run(
    library: Library,
    case: Case,
    arrays: dict[str, np.ndarray],
    outputs: Sequence[str] = ("dx", "db", "dw"),
    **options,
) -> dict[str, np.ndarray]:
    shapes = {"dx": arrays["x"].shape, "db": arrays["w"].shape[:1], "dw": arrays["w"].shape}
    wanted = {
        name: (shape, np.dtype(np.float32)) if name in outputs else None for name, shape in shapes.items()
    }
    attributes = ctypes.byref(case.attributes())
    return library.run_operator("conv_grad", arrays, wanted, attributes, **options)


CASES = {
    "3x3": Case(5, 6, 10, (9, 11), (3, 3), before=(1, 1)),
    "no padding": Case(3, 5, 7, (10, 13), (3, 2)),
    "1x1": Case(4, 9, 6, (6, 7), (1, 1)),
    "1x1 strided": Case(3, 4, 5, (7, 8), (1, 1), strides=(2, 3)),
    "strided": Case(3, 3, 9, (13, 14), (3, 3), strides=(2, 2), before=(1, 1)),
    "7x7 strided": Case(2, 3, 8, (20, 21), (7, 7), strides=(2, 2), before=(3, 3)),
    "stride larger than the kernel": Case(2, 3, 4, (11, 13), (2, 2), strides=(3, 4), before=(1, 0)),
    "dilated": Case(2, 4, 6, (15, 12), (3, 3), dilations=(2, 3), before=(2, 3)),
    "dilated and strided": Case(2, 4, 6, (15, 17), (3, 3), strides=(2, 3), dilations=(3, 2), before=(2, 1)),
    "uneven padding": Case(2, 3, 5, (7, 6), (4, 4), before=(3, 0), behind=(1, 5)),
    "more padding than kernel": Case(2, 2, 3, (3, 4), (2, 2), before=(4, 5), behind=(3, 20)),
    "positions that see only padding": Case(2, 2, 3, (1, 1), (1, 1), strides=(3, 3), before=(2, 2)),
    "groups": Case(3, 6, 9, (8, 9), (3, 3), before=(1, 1), groups=3),
    "depthwise": Case(3, 7, 7, (9, 10), (3, 3), before=(1, 1), groups=7),
    "one axis": Case(4, 5, 6, (50,), (5,), strides=(2,), before=(2,)),
    "one long axis": Case(1, 2, 3, (70001,), (9,), dilations=(40,), before=(160,)),
    "one long axis strided": Case(1, 2, 3, (70001,), (9,), strides=(4,), dilations=(3,)),
    "three axes": Case(2, 4, 6, (5, 6, 7), (3, 2, 3), before=(1, 0, 1)),
    "three axes strided": Case(2, 3, 4, (7, 6, 8), (3, 3, 3), (2, 1, 2), (1, 2, 1), (1, 2, 0)),
    "large image": Case(1, 3, 8, (130, 121), (3, 3), before=(1, 1)),
    "large image strided": Case(2, 3, 16, (150, 139), (7, 7), strides=(2, 2), before=(3, 3)),
    "large volume": Case(1, 5, 9, (20, 30, 31), (3, 3, 3), before=(1, 1, 1)),
    "many channels": Case(2, 70, 150, (6, 7), (3, 3), before=(1, 1)),
    "as large as the kernel": Case(2, 3, 4, (7, 160), (7, 160)),
    "one element": Case(1, 1, 1, (1, 1), (1, 1)),
    "many images": Case(100, 2, 3, (4, 4), (3, 3), before=(1, 1)),
    "no images": Case(0, 3, 4, (5, 5), (3, 3)),
}
with_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@with_cases
def test_every_element(library: Library, case: Case) -> None:
    arrays = case.arrays(whole_numbers=True)
    expected = exact(case, **arrays)
    assert max(np.abs(array).max(initial=0) for array in expected.values()) < 2**24, "not exact in float"
    for options in ({}, {"threads": Threads(3)}, {"offsets": {"x": 4, "dy": 8, "w": 12, "dx": 20, "dw": 4}}):
        for name, array in run(library, case, arrays, **options).items():
            np.testing.assert_array_equal(array, expected[name], err_msg=name)


@with_cases
def test_rounding(installed: Library, case: Case) -> None:
    arrays = case.arrays(whole_numbers=False)
    results, expected = run(installed, case, arrays), exact(case, **arrays)
    magnitudes = exact(case, **{name: np.abs(array) for name, array in arrays.items()})
    dy, w = arrays["dy"], arrays["w"]
    positions = dy.size // max(1, dy.shape[0] * dy.shape[1])
    summed = dy.shape[0] * positions
    lengths = {"dx": w.size // w.shape[1] // case.groups, "dw": summed, "db": summed}
    for name, array in results.items():
        bound = (lengths[name] + 1) * FLOAT32_ROUNDOFF * magnitudes[name]
        assert (np.abs(array - expected[name]) <= bound).all(), name


@pytest.mark.parametrize(
    "name", ["3x3", "many channels", "large image strided", "groups", "one long axis", "many images"]
)
def test_the_same_bits_on_threads_and_for_any_choice_of_outputs(installed: Library, name: str) -> None:
    case = CASES[name]
    arrays = case.arrays(whole_numbers=False)
    alone = run(installed, case, arrays)
    choices = [("dx", "db", "dw"), ("dw",), ("dx", "dw"), ("db", "dw")]
    for seed, outputs in enumerate(choices):
        threads = Threads(3, seed=seed)
        again = run(installed, case, arrays, outputs, threads=threads, repeats=2)
        assert list(again) == list(outputs)
        for output, array in again.items():
            assert array.tobytes() == alone[output].tobytes(), output


def test_what_is_not_finite_stays_in_its_filter_and_its_image(installed: Library) -> None:
    case = CASES["3x3"]
    arrays = case.arrays(whole_numbers=True)
    expected = exact(case, **arrays)
    arrays["dy"][2, 5, 4, 4] = np.nan
    results = run(installed, case, arrays)
    touched = {name: np.isnan(array) for name, array in results.items()}
    assert np.argwhere(touched["db"]).tolist() == [[5]]
    assert np.unique(np.argwhere(touched["dw"])[:, 0]).tolist() == [5] and touched["dw"][5].all()
    around = np.zeros_like(touched["dx"])
    around[2, :, 3:6, 3:6] = True
    assert (touched["dx"] == around).all()
    for name, array in results.items():
        assert (array[~touched[name]] == expected[name][~touched[name]]).all(), name


@pytest.mark.parametrize(
    "case, floats",
    [
        (Case(64, 16, 32, (14, 14), (3, 3), before=(1, 1)), 16 * (48 << 10) + 16 * (32 * 16 * 9 + 32)),
        (Case(8, 64, 64, (512, 512), (3, 3), before=(1, 1)), 16 * (48 << 10) + (1 << 20) + 16 * 64),
        (Case(8, 512, 512, (14, 14), (3, 3), before=(1, 1)), 16 * (48 << 10)),
    ],
    ids=["small", "large images", "many channels"],
)
def test_the_workspace_is_small(installed: Library, case: Case, floats: int) -> None:
    size = tuple(case.size)
    x, w = tensor([case.batch, case.channels, *size], 1), tensor([case.filters, case.channels, 3, 3], 1)
    dy, db = tensor([case.batch, case.filters, *size], 1), tensor([case.filters], 1)
    attributes = ctypes.byref(case.attributes())
    assert 0 < installed.plan_operator("conv_grad", [dy, x, w, x, db, w], attributes) <= 4 * floats


GOOD = Case(2, 6, 8, (9, 8), (3, 3), strides=(2, 1), before=(1, 0), groups=2)


def changed(**fields: object) -> Convolution:
    convolution = GOOD.attributes()
    for name, value in fields.items():
        if isinstance(value, tuple):
            value = (ctypes.c_int64 * len(value))(*value)
        setattr(convolution, name, value)
    return convolution


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (
            {"x": tensor([2, 6, 9], 1)},
            r"x must have rank 4, two more than strides has numbers; got \[2,6,9\]",
        ),
        (
            {"x": tensor([2, 5, 9, 8], 1)},
            r"x must have 6 channels, group times those of w .* got \[2,5,9,8\]",
        ),
        ({"x": tensor([2, 6, 9, 8], 10)}, "x must be float; got float16"),
        ({"x": tensor([2, 6, 9, 2], 1)}, r"x must be, padded, at least as large as the kernel of w .* got "),
        ({"w": tensor([7, 3, 3, 3], 1)}, r"the filters of w \[7,3,3,3\] must be a multiple of group; got 2"),
        ({"w": tensor([8, 3, 3, 0], 1)}, r"w must have no dim 0; got \[8,3,3,0\]"),
        (
            {"dy": tensor([2, 8, 5, 5], 1)},
            r"dy must be \[2,8,5,6\], the shape of the convolution of x .* got ",
        ),
        ({"dy": tensor([1, 8, 5, 6], 1)}, r"dy must be \[2,8,5,6\], .* got \[1,8,5,6\]"),
        ({"dx": tensor([2, 6, 9, 9], 1)}, r"dx must have the shape of x, \[2,6,9,8\]; got \[2,6,9,9\]"),
        ({"dw": tensor([8, 6, 3, 3], 1)}, r"dw must have the shape of w, \[8,3,3,3\]; got \[8,6,3,3\]"),
        ({"db": tensor([7], 1)}, r"db must be \[8\], the filters of w \[8,3,3,3\]; got \[7\]"),
        ({"convolution": changed(axes=4)}, "the convolution must have 1 to 3 axes; got 4"),
        ({"convolution": changed(strides=(2, 0, 0))}, "strides must be at least 1 and at most 2\\^28; got 0"),
        (
            {"convolution": changed(dilations=(2**40, 1, 1))},
            "dilations must be at least 1 .* got 1099511627776",
        ),
        ({"convolution": changed(pads=(0, 0, -1, 0, 0, 0))}, "pads must be at least 0 .* got -1"),
        ({"convolution": changed(groups=0)}, "group must be at least 1 .* got 0"),
    ],
)
def test_what_is_refused(installed: Library, changes: dict, sentence: str) -> None:
    def plan(**given) -> int:
        good = {
            "dy": tensor([2, 8, 5, 6], 1),
            "x": tensor([2, 6, 9, 8], 1),
            "w": tensor([8, 3, 3, 3], 1),
            "dx": tensor([2, 6, 9, 8], 1),
            "db": tensor([8], 1),
            "dw": tensor([8, 3, 3, 3], 1),
        }
        convolution = given.pop("convolution", GOOD.attributes())
        return installed.plan_operator("conv_grad", [*(good | given).values()], ctypes.byref(convolution))

    with pytest.raises(KernelError, match=sentence) as caught:
        plan(**changes)
    assert caught.value.status == INVALID_PARAMETER
    assert plan() > 0

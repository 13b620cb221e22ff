"""The registered kernel against the float64 oracle, through an InferenceSession.

Every case but those about the function body is loaded without one, so that only the kernel can have answered.
"""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx.helper
import pytest
from operator_models import elem_type, make_model, run_session
from oracle import BFLOAT16, DTYPES, FLOAT, FLOAT16, add_layer_norm_grad, assert_matches, make_inputs
from plugin_sessions import executed_operators, plugin_session, run_kernel

from ort_ops.operators import embed_functions

TYPES = [(FLOAT, FLOAT), (FLOAT16, FLOAT16), (BFLOAT16, BFLOAT16), (FLOAT16, FLOAT), (BFLOAT16, FLOAT)]
PRESENCE = list(itertools.product([True, False], repeat=2))
NAN_PATTERNS = {
    FLOAT: (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF80FFFF, 0x7FC0FFFF),
    FLOAT16: (0x7FFF, 0xFFFF, 0x7C01, 0xFC01),
    BFLOAT16: (0x7FFF, 0xFFFF, 0x7F81, 0xFF81),
}
OUTPUT_SUBSETS = [
    ("dx",),
    ("dx", "dgamma"),
    ("dx", "", "dbeta"),
    ("dx", "", ""),
    ("", "dgamma"),
    ("", "dgamma", "dbeta"),
    ("", "", "dbeta"),
]


@pytest.mark.parametrize("dtype, gamma_dtype", TYPES, ids=str)
@pytest.mark.parametrize("x2, dsum", PRESENCE)
class TestEveryTypeAndPresence:
    def test_numbers(self, dtype, gamma_dtype, x2, dsum):
        inputs = make_inputs((9, 3, 131), dtype, gamma_dtype=gamma_dtype, x2=x2, dsum=dsum)
        assert_matches(inputs, **run_kernel(inputs))

    def test_each_subset_of_outputs_is_bit_equal_to_the_complete_run(self, dtype, gamma_dtype, x2, dsum):
        inputs = make_inputs((70, 131), dtype, gamma_dtype=gamma_dtype, x2=x2, dsum=dsum)
        complete = run_kernel(inputs)
        for outputs in OUTPUT_SUBSETS:
            results = run_kernel(inputs, outputs)
            assert list(results) == [name for name in outputs if name]
            for name, array in results.items():
                np.testing.assert_array_equal(array, complete[name], err_msg=f"outputs {outputs}")

    def test_kernel_runs_instead_of_the_embedded_body(self, dtype, gamma_dtype, x2, dsum):
        inputs = make_inputs((4, 16), dtype, gamma_dtype=gamma_dtype, x2=x2, dsum=dsum)
        model = embed_functions(make_model(inputs))
        assert executed_operators(model, inputs.arrays()) == {"AddLayerNormGrad": 1}
        results = run_session(plugin_session(model), inputs.arrays())
        for name, array in run_kernel(inputs).items():
            np.testing.assert_array_equal(results[name], array)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestShapes:
    @pytest.mark.parametrize("trailing_ones", [True, False])
    @pytest.mark.parametrize(
        "shape, axes",
        [
            ((5,), 1),
            ((1,), 1),
            ((2, 3, 5), 1),
            ((2, 3, 4, 5), 1),
            ((2, 1, 2, 3, 1, 2, 2, 5), 1),
            ((4, 8, 16), 2),
            ((2, 2, 1, 2, 3, 1, 2, 5), 3),
            ((3, 4, 5), 3),
            ((1, 1, 1, 1, 1, 1, 1, 1), 8),
            ((0, 5), 1),
            ((2, 0, 3, 4), 2),
        ],
        ids=str,
    )
    def test_rank_and_normalised_axes(self, dtype, shape, axes, trailing_ones):
        inputs = make_inputs(shape, dtype, axes=axes, trailing_ones=trailing_ones)
        results = run_kernel(inputs, symbolic=True)
        assert_matches(inputs, **results)

        flat = inputs.replace(
            **{
                name: array.reshape(-1 if name == "gamma" else (inputs.rows, inputs.cols))
                for name, array in inputs.arrays().items()
                if name not in ("mean", "rstd")
            },
            mean=inputs.mean.reshape(-1),
            rstd=inputs.rstd.reshape(-1),
        )
        for name, array in run_kernel(flat).items():
            np.testing.assert_array_equal(array.reshape(results[name].shape), results[name])

    def test_no_rows_give_zero_parameter_gradients(self, dtype):
        results = run_kernel(make_inputs((3, 0, 6), dtype))
        assert results["dx"].shape == (3, 0, 6)
        np.testing.assert_array_equal(results["dgamma"], np.zeros(6, FLOAT))
        np.testing.assert_array_equal(results["dbeta"], np.zeros(6, FLOAT))

    @pytest.mark.parametrize("cols", [*range(1, 10), 15, 17, 31, 33, 63, 65, 100, 127, 769, 1536, 1600, 4093])
    def test_widths_that_leave_a_part_of_a_vector(self, dtype, cols):
        """x has mean 50, so that a lane that leaked into a sum would be huge."""
        inputs = make_inputs((9, cols), dtype, x_mean=50.0)
        assert_matches(inputs, **run_kernel(inputs))

    @pytest.mark.parametrize("cols", [1, 3, 5, 7, 11, 100])
    def test_lanes_beyond_the_row_do_not_overflow(self, dtype, cols):
        """x equals its mean, so xhat is 0; a lane that held 0 - mean would be infinite times rstd."""
        inputs = make_inputs((9, cols), dtype, x2=False)
        large = {FLOAT: 1e30, FLOAT16: 6e4, BFLOAT16: 1e30}[dtype]
        x1 = np.full((9, cols), large, dtype)
        inputs = inputs.replace(
            x1=x1, mean=x1[:, :1].astype(FLOAT), rstd=np.full((9, 1), 1e10 if large == 1e30 else 1e35, FLOAT)
        )
        with np.errstate(over="ignore"):
            assert np.isinf(inputs.mean * inputs.rstd).all()
        results = run_kernel(inputs)
        assert_matches(inputs, **results)
        assert (results["dgamma"] == 0).all()

    @pytest.mark.parametrize("cols", [3, 7, 100, 769, 1600])
    def test_rows_of_dx_sum_to_zero_when_gamma_is_one(self, dtype, cols):
        inputs = make_inputs((9, cols), dtype, x_mean=50.0, dsum=False)
        inputs = inputs.replace(gamma=np.ones(cols, dtype))
        exact, _, _ = add_layer_norm_grad(**vars(inputs))
        dx = run_kernel(inputs, ("dx",))["dx"].astype(np.float64)
        g = np.abs(inputs.dy.astype(np.float64)).sum(axis=1)
        u = 2.0**-24
        # What is left in exact arithmetic: mean was rounded, so xhat's own sum is not quite zero.
        rounded_mean = 2 * u * 50 * inputs.rstd[:, 0] ** 2 * g
        assert (np.abs(exact.sum(axis=1)) <= rounded_mean).all()
        one_rounding_to_t = {FLOAT: u, FLOAT16: 2.0**-11, BFLOAT16: 2.0**-8}[dtype] * np.abs(exact).sum(
            axis=1
        )
        float32_sums = u * (np.sqrt(cols) + 20) * inputs.rstd[:, 0] * 3 * g
        assert (np.abs(dx.sum(axis=1)) <= rounded_mean + one_rounding_to_t + float32_sums).all()

    @pytest.mark.parametrize("cols", [4096, 8192, 16384, 65536, 65537, 131072, 200003])
    def test_wide_rows(self, dtype, cols):
        inputs = make_inputs((3, cols), dtype)
        assert_matches(inputs, **run_kernel(inputs))

    @pytest.mark.parametrize("rows", [1, 2, 255, 256, 257, 20011])
    def test_tall_tables(self, dtype, rows):
        inputs = make_inputs((rows, 24), dtype)
        assert_matches(inputs, **run_kernel(inputs, threads=2))


class TestStatistics:
    @pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
    def test_are_not_narrowed_to_the_data_type(self, dtype):
        inputs = make_inputs((512, 256), dtype, x_mean=100.37, x2=False)
        results = run_kernel(inputs)
        assert_matches(inputs, **results)
        narrowed = inputs.replace(
            mean=inputs.mean.astype(dtype).astype(FLOAT), rstd=inputs.rstd.astype(dtype).astype(FLOAT)
        )
        with pytest.raises(AssertionError, match="dgamma"):
            assert_matches(narrowed, dgamma=results["dgamma"])

    @pytest.mark.parametrize("dtype, big", [(BFLOAT16, 256.0), (FLOAT16, 2048.0)], ids=str)
    def test_belong_to_the_sum_as_the_forward_add_rounds_it(self, dtype, big):
        inputs = make_inputs((40, 64), dtype)
        x1, x2 = inputs.x1.copy(), inputs.x2.copy()
        x1[:, ::4], x2[:, ::4] = big, 1.0
        total = (x1.astype(np.float64) + x2.astype(np.float64)).astype(dtype).astype(np.float64)
        assert (total[:, ::4] == big).all()
        inputs = inputs.replace(
            x1=x1,
            x2=x2,
            mean=total.mean(axis=1, keepdims=True).astype(FLOAT),
            rstd=(1 / np.sqrt(total.var(axis=1, keepdims=True) + 1e-5)).astype(FLOAT),
        )
        results = run_kernel(inputs)
        assert_matches(inputs, **results)
        unrounded = inputs.replace(x1=x1.astype(FLOAT) + x2.astype(FLOAT), x2=None)
        with pytest.raises(AssertionError, match="dgamma"):
            assert_matches(unrounded, dgamma=results["dgamma"])

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_flat_rows_with_a_tiny_epsilon(self, dtype):
        """Constant rows have rstd 1/sqrt(1e-12) = 1e6, beyond float16; their x - mean is exactly zero."""
        inputs = make_inputs((64, 96), dtype, epsilon=1e-12)
        dy = (inputs.dy.astype(FLOAT) * 1e-3).astype(dtype)
        x1 = inputs.x1.copy()
        x1[::2] = 0.5
        inputs = inputs.replace(dy=dy, x1=x1, x2=np.zeros_like(x1), dsum=None)
        total = inputs.x1.astype(np.float64)
        inputs = inputs.replace(
            mean=total.mean(axis=1, keepdims=True).astype(FLOAT),
            rstd=(1 / np.sqrt(total.var(axis=1, keepdims=True) + 1e-12)).astype(FLOAT),
        )
        assert inputs.rstd[::2].min() > 9e5
        results = run_kernel(inputs)
        assert_matches(inputs, **results)
        exact = add_layer_norm_grad(**vars(inputs))[0]
        fits = np.abs(exact) < 6e4
        assert fits.any() and np.isfinite(results["dx"].astype(np.float64)[fits]).all()
        _, only_the_others, _ = add_layer_norm_grad(
            **vars(
                inputs.replace(
                    **{name: array[1::2] for name, array in inputs.arrays().items() if name != "gamma"}
                )
            )
        )
        np.testing.assert_allclose(results["dgamma"], only_the_others, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestResidualGradient:
    def test_is_added_after_the_norm(self, dtype):
        """Added before it, a constant would be projected out and change nothing."""
        inputs = make_inputs((16, 128), dtype, dsum=False)
        without = run_kernel(inputs)
        ones = run_kernel(inputs.replace(dsum=np.ones_like(inputs.dy)))
        difference = ones["dx"].astype(np.float64) - without["dx"].astype(np.float64)
        spacing = {FLOAT: 2.0**-23, FLOAT16: 2.0**-10, BFLOAT16: 2.0**-7}[dtype]
        largest = np.abs(ones["dx"].astype(np.float64)).max() + 1
        assert np.abs(difference - 1).max() <= 2 * spacing * largest
        for name in ("dgamma", "dbeta"):
            np.testing.assert_array_equal(ones[name], without[name])

    def test_may_be_far_larger_than_the_norms_part(self, dtype):
        inputs = make_inputs((16, 128), dtype)
        inputs = inputs.replace(
            dy=(inputs.dy.astype(FLOAT) * 1e-3).astype(dtype),
            dsum=(inputs.dsum.astype(FLOAT) * 1e4).astype(dtype),
        )
        assert_matches(inputs, **run_kernel(inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestNonFinite:
    @pytest.mark.parametrize("where", ["dy", "x1", "x2", "rstd", "mean", "gamma", "dsum"])
    @pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("index", [0, -1])
    def test_as_the_formula_says_and_other_rows_untouched(self, dtype, where, what, index):
        inputs = make_inputs((37, 45), dtype)
        array = getattr(inputs, where).copy()
        array.reshape(-1)[index] = what
        broken = inputs.replace(**{where: array})
        results = run_kernel(broken)
        assert_matches(broken, **results)
        if where != "gamma":
            others = np.delete(results["dx"], index, axis=0)
            np.testing.assert_array_equal(others, np.delete(run_kernel(inputs)["dx"], index, axis=0))

    @pytest.mark.parametrize("where", ["dy", "x1", "x2", "rstd", "mean", "gamma", "dsum"])
    @pytest.mark.parametrize("gamma_dtype", [None, FLOAT], ids=str)
    def test_every_nan_stays_one_whatever_its_payload(self, dtype, gamma_dtype, where):
        """Rounding a NaN's bits like a number's can carry it into infinity or zero."""
        inputs = make_inputs((5, 45), dtype, gamma_dtype=gamma_dtype)
        bits = {4: np.uint32, 2: np.uint16}[getattr(inputs, where).itemsize]
        for pattern in NAN_PATTERNS[getattr(inputs, where).dtype]:
            array = getattr(inputs, where).copy()
            array.view(bits).reshape(-1)[1] = pattern
            broken = inputs.replace(**{where: array})
            assert_matches(broken, **run_kernel(broken))

    def test_overflow_of_the_data_type_is_infinity(self, dtype):
        inputs = make_inputs((8, 32), dtype)
        largest = np.float64(np.finfo(dtype).max) if dtype != BFLOAT16 else 3.3895313892515355e38
        inputs = inputs.replace(
            dy=(inputs.dy.astype(FLOAT) * 0.25).astype(dtype), dsum=np.full((8, 32), largest, dtype)
        )
        inputs = inputs.replace(rstd=inputs.rstd * (100 if dtype == FLOAT16 else 1))
        results = run_kernel(inputs)
        assert_matches(inputs, **results)
        if dtype == FLOAT16:
            assert np.isinf(results["dx"]).any()

    def test_smallest_numbers_are_not_flushed_to_zero(self, dtype):
        smallest = {FLOAT: 2.0**-140, FLOAT16: 2.0**-24, BFLOAT16: 2.0**-130}[dtype]
        inputs = make_inputs((8, 32), dtype)
        inputs = inputs.replace(
            dy=np.zeros((8, 32), dtype),
            dsum=np.full((8, 32), smallest * 3 if dtype == FLOAT16 else smallest, dtype),
        )
        np.testing.assert_array_equal(run_kernel(inputs)["dx"], inputs.dsum)


class TestSmallTables:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("rows", [1, 2])
    def test_scratch_memory_is_not_read_before_it_is_written(self, dtype, rows):
        """Other large nodes dirty the memory pool between the calls; each must give the same values."""
        for cols in range(1, 10):
            for x in (np.zeros((rows, cols)), np.tile([[1.0], [-1.0]], (1, cols))[:rows]):
                inputs = make_inputs((rows, cols), dtype)
                inputs = inputs.replace(x1=x.astype(dtype), x2=np.zeros((rows, cols), dtype))
                session = plugin_session(_with_dirty_memory(make_model(inputs)), threads=2)
                feeds = {**inputs.arrays(), "noise": np.full((100_000,), 1e30, FLOAT)}
                first = run_session(session, feeds)
                assert_matches(inputs, **{name: first[name] for name in ("dx", "dgamma", "dbeta")})
                for _ in range(10):
                    for name, array in run_session(session, feeds).items():
                        np.testing.assert_array_equal(array, first[name])


def _with_dirty_memory(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model beside nodes that fill large temporary buffers with large numbers."""
    graph = model.graph
    graph.input.append(onnx.helper.make_tensor_value_info("noise", onnx.TensorProto.FLOAT, ["n"]))
    graph.output.append(onnx.helper.make_tensor_value_info("noise_sum", onnx.TensorProto.FLOAT, None))
    for index, (op, source) in enumerate([("Neg", "noise"), ("Abs", "noise_0"), ("Neg", "noise_1")]):
        graph.node.insert(index, onnx.helper.make_node(op, [source], [f"noise_{index}"]))
    graph.node.append(onnx.helper.make_node("ReduceSum", ["noise_2"], ["noise_sum"], keepdims=0))
    return model


class TestTypesInOneModel:
    @pytest.mark.parametrize("order", [1, -1])
    def test_each_node_runs_the_kernel_of_its_type(self, order):
        """Outputs are declared without type, so that the runtime's inference has to find it."""
        cases = {
            f"n{index}_": make_inputs((5, 24), dtype, gamma_dtype=gamma_dtype, seed=index)
            for index, (dtype, gamma_dtype) in enumerate(TYPES)
        }
        models = [
            _prefixed(make_model(inputs, declare_outputs=False), prefix) for prefix, inputs in cases.items()
        ]
        merged = models[0]
        for other in models[1:]:
            for field in ("node", "input", "output"):
                getattr(merged.graph, field).extend(getattr(other.graph, field))
        nodes = list(merged.graph.node)[::order]
        del merged.graph.node[:]
        merged.graph.node.extend(nodes)

        session = plugin_session(merged)
        types = {output.name: output.type for output in session.get_outputs()}
        feeds = {
            prefix + name: array
            for prefix, inputs in cases.items()
            for name, array in inputs.arrays().items()
        }
        results = run_session(session, feeds)
        names = {FLOAT: "tensor(float)", FLOAT16: "tensor(float16)", BFLOAT16: "tensor(bfloat16)"}
        for prefix, inputs in cases.items():
            assert types[prefix + "dx"] == names[inputs.dy.dtype]
            assert types[prefix + "dgamma"] == types[prefix + "dbeta"] == "tensor(float)"
            assert_matches(inputs, **{name: results[prefix + name] for name in ("dx", "dgamma", "dbeta")})


def _prefixed(model: onnx.ModelProto, prefix: str) -> onnx.ModelProto:
    for value in (*model.graph.input, *model.graph.output):
        value.name = prefix + value.name
    for node in model.graph.node:
        node.name = prefix + node.name
        for names in (node.input, node.output):
            names[:] = [prefix + name if name else "" for name in names]
    return model


class TestShapesKnownToTheRuntime:
    @pytest.mark.parametrize("known", ["lengths", "symbols", "rank unknown"])
    def test_inferred_shapes_are_right(self, known):
        """Shape nodes are folded into constants wherever the runtime believes to know the shape."""
        inputs = make_inputs((4, 6, 8), axes=2)
        model = make_model(inputs, declare_outputs=False, symbolic=known == "symbols")
        if known == "rank unknown":
            for value in model.graph.input:
                value.type.tensor_type.ClearField("shape")
        for name in ("dx", "dgamma", "dbeta"):
            model.graph.node.append(onnx.helper.make_node("Shape", [name], [f"{name}_shape"]))
            model.graph.output.append(onnx.ValueInfoProto(name=f"{name}_shape"))
        session = plugin_session(model)
        shapes = {output.name: output.shape for output in session.get_outputs()}
        if known != "rank unknown":
            assert shapes["dx"] == ([4, 6, 8] if known == "lengths" else ["dy_0", "dy_1", "dy_2"])
        results = run_session(session, inputs.arrays())
        assert results["dx_shape"].tolist() == [4, 6, 8]
        assert results["dgamma_shape"].tolist() == results["dbeta_shape"].tolist() == [6, 8]


class TestBuffers:
    GUARD_BYTES = 256
    PATTERN = 0xA5

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape, axes", [((9, 45), 1), ((2, 3, 8, 16), 2), ((7,), 1), ((3, 768), 1)])
    @pytest.mark.parametrize("offset_elements", [0, 1])
    def test_nothing_is_written_outside_of_outputs_of_any_alignment(
        self, dtype, shape, axes, offset_elements
    ):
        """Every tensor lies in a larger buffer of a known pattern, aligned or one element past that."""
        inputs = make_inputs(shape, dtype, axes=axes)
        session = plugin_session(make_model(inputs), threads=2)
        binding = session.io_binding()
        buffers = {}
        for name, array in inputs.arrays().items():
            buffer, view = self._embed(array.dtype, array.shape, offset_elements)
            view[...] = array
            buffers[name] = buffer, view
            self._bind(binding.bind_input, name, view)
        outputs = {"dx": (dtype, shape), "dgamma": (FLOAT, shape[-axes:]), "dbeta": (FLOAT, shape[-axes:])}
        for name, (output_dtype, output_shape) in outputs.items():
            buffers[name] = self._embed(output_dtype, output_shape, offset_elements)
            self._bind(binding.bind_output, name, buffers[name][1])
        session.run_with_iobinding(binding)

        aligned = run_kernel(inputs)
        for name, (buffer, view) in buffers.items():
            np.testing.assert_array_equal(view, aligned[name] if name in outputs else getattr(inputs, name))
            outside = np.ones(buffer.size, bool)
            start = view.ctypes.data - buffer.ctypes.data
            outside[start : start + view.nbytes] = False
            assert (buffer[outside] == self.PATTERN).all(), f"bytes around {name} were changed"
        assert_matches(inputs, **{name: buffers[name][1] for name in outputs})

    def _embed(
        self, dtype: np.dtype, shape: tuple[int, ...], offset_elements: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """A buffer of the pattern, and the tensor inside of it."""
        size = int(np.prod(shape)) * dtype.itemsize
        buffer = np.full(size + 2 * self.GUARD_BYTES + 64, self.PATTERN, np.uint8)
        start = (
            self.GUARD_BYTES
            + -(buffer.ctypes.data + self.GUARD_BYTES) % 64
            + offset_elements * dtype.itemsize
        )
        return buffer, buffer[start : start + size].view(dtype).reshape(shape)

    def _bind(self, bind, name: str, view: np.ndarray) -> None:
        bind(name, "cpu", 0, elem_type(view.dtype), list(view.shape), view.ctypes.data)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("threads", [1, 2])
    def test_results_are_right_where_the_runtime_reuses_a_gradients_buffer(self, dtype, threads):
        """dsum is made in the graph and read by nothing else, so dx takes over its buffer; likewise dy."""
        inputs = make_inputs((300, 257), dtype)
        for names in (("dsum",), ("dy",), ("dsum", "dy")):
            model = make_model(inputs)
            for name in names:
                _make_inside_the_graph(model, name)
            results = run_session(plugin_session(model, threads=threads), inputs.arrays())
            assert_matches(inputs, **results)
            for name, array in run_kernel(inputs).items():
                np.testing.assert_array_equal(results[name], array)

    @pytest.mark.parametrize(
        "shared", [("dy", "dsum"), ("dy", "x1"), ("x1", "x2"), ("dy", "x1", "x2", "dsum")]
    )
    def test_one_tensor_in_several_roles(self, shared):
        inputs = make_inputs((300, 57))
        inputs = inputs.replace(**{name: getattr(inputs, shared[0]) for name in shared[1:]})
        model = make_model(inputs)
        node = model.graph.node[0]
        node.input[:] = [shared[0] if name in shared else name for name in node.input]
        for value in [value for value in model.graph.input if value.name in shared[1:]]:
            model.graph.input.remove(value)
        _make_inside_the_graph(model, shared[0])
        feeds = {name: array for name, array in inputs.arrays().items() if name not in shared[1:]}
        assert_matches(inputs, **run_session(plugin_session(model), feeds))


def _make_inside_the_graph(model: onnx.ModelProto, name: str) -> None:
    """Lets a node of the graph make this input of the operator, in a buffer that belongs to the runtime."""
    value = next(value for value in model.graph.input if value.name == name)
    rows = value.type.tensor_type.shape.dim[0].dim_value
    every_row = onnx.helper.make_tensor(f"{name}_rows", onnx.TensorProto.INT64, [rows], range(rows))
    model.graph.initializer.append(every_row)
    for node in model.graph.node:
        node.input[:] = [f"{name}_made" if operand == name else operand for operand in node.input]
    copy = onnx.helper.make_node("Gather", [name, every_row.name], [f"{name}_made"], axis=0)
    model.graph.node.insert(0, copy)

"""Data parallel training over MPI: every rank holds the whole model and works on its part of each batch.

Started by `mpirun -n RANKS python script.py`; needs mpi4py and an MPI library. `run` calls the script's
function so that a rank that fails ends the whole job, `DataParallel` makes the ranks begin with the same
values and averages the gradients of every step. With one batch shared out among the ranks, the losses are
those of one process that has the whole batch, but for the rounding of float32 sums taken in another order.

The all-reduce begins when the backward pass is over, for ONNX Runtime hands out all gradients together, at
the end of a run. Cutting the backward pass in parts, to overlap the one with the other, could hide no more
than the all-reduce takes: with two ranks on two busy cores and 0.8 million parameters that was 22 to 46 ms
of a step of 0.35 to 0.6 s.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ort_ops.training.api import Module
from ort_ops.training.api.tensor import Tensor, ort_value

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

# What the launchers of Open MPI, of MPICH and its relatives, and of Slurm tell the processes they start.
_RANK_COUNT_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")

# The size of a cache line, and what the widest vector registers load at once.
_ALIGNMENT_BYTES = 64

_SECONDS_FOR_RANK_0_TO_SPEAK = 0.5


def started_by_mpi() -> bool:
    """Whether this process is one of several that an MPI launcher started."""
    return any(int(os.environ.get(name, "1")) > 1 for name in _RANK_COUNT_VARIABLES)


def run(main: Callable[[Comm], None]) -> None:
    """Call `main` with the communicator of all ranks. If it fails in one, the whole job ends.

    Without that the other ranks would wait for ever for the one that is gone. The rank that fails prints the
    traceback and which rank it is; a rank that is killed is named by the launcher. A SystemExit with a code
    other than 0 ends the job with that code, without traceback. Raises ImportError when mpi4py is missing.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ImportError(
            f"Training in several processes needs mpi4py ({error}); run: pip install 'ort-ops[distributed]'"
        ) from error

    communicator = MPI.COMM_WORLD
    try:
        main(communicator)
    except BaseException as error:
        code = _exit_code(error)
        if code == 0 or communicator.size == 1:
            raise
        let_rank_0_speak(communicator)
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        print(
            f"Rank {communicator.rank} of {communicator.size} failed ({_summary(error)}); the job ends.",
            file=sys.stderr,
            flush=True,
        )
        communicator.Abort(code)


def let_rank_0_speak(communicator: Comm) -> None:
    """Wait, on other ranks, before an error is told: a mistake common to all, such as a missing file, is told
    once, for rank 0 ends the job meanwhile.
    """
    if communicator.rank:
        time.sleep(_SECONDS_FOR_RANK_0_TO_SPEAK)


class DataParallel:
    """Makes the ranks train one model: they begin with the values of rank 0, and average their gradients.

    module: of this rank, after its Optimizer has been made, because that adds the optimizer's state.
    communicator: all ranks; each must make a DataParallel.

        parallel = DataParallel(module, communicator)
        for batch in batches:  # the same on every rank
            part = parallel.share(batch)
            loss = module(part) if len(part) else 0.0
            loss = parallel.average_gradients(len(part), loss)
            optimizer.step()
            module.lazy_reset_grad()

    Only rank 0 should print and write files. Raises ValueError, on every rank, if their tensors do not have
    the same names, types and shapes.
    """

    def __init__(self, module: Module, communicator: Comm) -> None:
        self._state = module.state.training_state
        self._communicator = communicator
        if communicator.size > 1:
            self._broadcast()
            self.check_equal()
            self._averaged = _FlatBuffer([*module.gradients.values(), *module.updated_parameters.values()])

    @property
    def rank(self) -> int:
        """Number of this process; the first is 0."""
        return self._communicator.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._communicator.size

    def share(self, batch: np.ndarray) -> np.ndarray:
        """This rank's part of the rows of `batch`. The parts differ by one row at most; some may be empty."""
        return np.array_split(batch, self.size)[self.rank]

    def average_gradients(self, samples: int, loss: float) -> float:
        """Replace the gradients of every rank by their average over the samples of all, and return that of
        `loss`. So are the statistics that the forward pass updates (BatchNorm's), which each rank takes
        from its own part.

        samples: how many this rank has worked on. With 0 its gradients and loss count for nothing.

        Right for losses that are means over their samples. Call it on every rank, before `Optimizer.step`.
        The ranks get the same bits, run after run if they are as many and placed alike. Raises ValueError
        if no rank has a sample.
        """
        if self.size == 1:
            return loss
        with self._state.lock:
            return self._averaged.average(samples, loss, self._communicator)

    def average(self, value: float, samples: int) -> float:
        """The average of a value over the samples of all ranks, for example of a validation loss. Call it
        on all."""
        parts = self._communicator.allgather((value, samples))
        # Added in the order of the ranks: the same bits everywhere.
        weighted = sum(value * samples for value, samples in parts if samples)
        return weighted / sum(samples for _, samples in parts)

    def check_same(self, what: str, value: object) -> None:
        """Raise ValueError, on every rank, unless all call it with the same value. `what` names it."""
        values = self._communicator.allgather(value)
        for rank, found in enumerate(values):
            if found != values[0]:
                raise ValueError(
                    f"All ranks must have the same {what}; rank {rank} has {found}, rank 0 has {values[0]}."
                )

    def check_equal(self) -> None:
        """Raise ValueError, on every rank, if a parameter or a tensor of the optimizer differs between ranks.

        After an update the ranks differ only if their processors round differently or one of them has
        changed a value by itself. Call it on every rank.
        """
        with self._state.lock:
            digests = {name: _digest(tensor) for name, tensor in self._tensors().items()}
        per_rank = self._communicator.allgather(digests)
        for name, expected in per_rank[0].items():
            differing = [rank for rank, found in enumerate(per_rank) if found[name] != expected]
            if differing:
                ranks = ", ".join(map(str, differing))
                raise ValueError(
                    f"All ranks must hold the same values; '{name}' differs on rank {ranks} from what it is "
                    "on rank 0. Change parameters and optimizer state on all ranks alike."
                )

    def _broadcast(self) -> None:
        tensors = self._tensors()
        _check_same_layout({name: (t.dtype.name, t.shape) for name, t in tensors.items()}, self._communicator)
        with self._state.lock:
            for tensor in tensors.values():
                values = np.ascontiguousarray(tensor.read())
                self._communicator.Bcast(values.view(np.uint8), root=0)
                tensor.write(values)
            self._state.learning_rate = self._communicator.bcast(self._state.learning_rate)

    def _tensors(self) -> dict[str, Tensor]:
        return {**self._state.parameters, **self._state.optimizer_state}


class _FlatBuffer:
    """One array for all that is averaged, which is what the ranks add up.

    On the CPU the tensors' own memory is moved into it, so that nothing is copied; those of another type or
    on another device are copied in and out. Two numbers follow: the samples and their summed loss.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        wide = any(tensor.dtype == np.float64 for tensor in tensors)
        dtype = np.dtype(np.float64 if wide else np.float32)
        sizes = [math.prod(tensor.shape) for tensor in tensors]
        aligned = _ALIGNMENT_BYTES // dtype.itemsize
        starts = np.cumsum([0, *(-(-size // aligned) * aligned for size in sizes)]).tolist()
        self._array = np.zeros(starts[-1] + 2, dtype)
        self._copied: list[tuple[Tensor, np.ndarray]] = []
        for tensor, start, size in zip(tensors, starts, sizes, strict=False):
            part = self._array[start : start + size].reshape(tensor.shape)
            if tensor.array is not None and tensor.dtype == dtype:
                part[...] = tensor.array
                tensor.array, tensor.value = part, ort_value(part)
            else:
                self._copied.append((tensor, part))

    def average(self, samples: int, loss: float, communicator: Comm) -> float:
        array = self._array
        if samples:
            for tensor, part in self._copied:
                part[...] = tensor.read()
            array *= samples
            array[-2:] = samples, loss * samples
        else:
            array[:] = 0  # not times 0: what an earlier step left may be infinite
        from mpi4py import MPI

        communicator.Allreduce(MPI.IN_PLACE, array)
        total = array[-2]
        if not total:
            raise ValueError("average_gradients: at least one rank must have a sample; all were given 0.")
        array /= total
        for tensor, part in self._copied:
            tensor.write(part.astype(tensor.dtype))
        return float(array[-1])


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tensor.read()).tobytes(), digest_size=16).digest()


def _check_same_layout(layout: Mapping[str, tuple[str, Sequence[int]]], communicator: Comm) -> None:
    layouts = communicator.allgather(layout)
    expected = layouts[0]
    for rank, found in enumerate(layouts):
        for name in sorted({*expected, *found}):
            if found.get(name) != expected.get(name):
                raise ValueError(
                    f"All ranks must train the same model with the same optimizer; '{name}' "
                    f"is {_described(found.get(name))} on rank {rank} and {_described(expected.get(name))} "
                    "on rank 0."
                )


def _described(kind: tuple[str, Sequence[int]] | None) -> str:
    return "missing" if kind is None else f"{kind[0]} {list(kind[1])}"


def threads_per_rank(communicator: Comm) -> int:
    """Threads for the sessions of this rank, so that all ranks on this machine together have one a core."""
    from mpi4py import MPI

    neighbours = communicator.Split_type(MPI.COMM_TYPE_SHARED)
    cores = os.cpu_count() or 1
    # A launcher may bind each rank to cores of its own.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    threads = max(1, min(allowed, cores // neighbours.size))
    neighbours.Free()
    return threads


def _exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _summary(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, str) else f"exit code {error.code}"
    return f"{type(error).__name__}: {error}"

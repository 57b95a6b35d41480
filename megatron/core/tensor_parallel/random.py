"""Random streams of a rank: what is drawn alike on which ranks, and how the streams are saved and restored.

    stream                 seeded by                                used for
    default                seed, pp, dp, cp                         dropout on activations that are whole on every tensor rank
    "model-parallel-rng"   seed, pp, dp, cp, tp                     dropout on activations split over tensor ranks
    "expert-parallel-rng"  seed, pp, position among the experts     dropout inside experts

So masks agree over tensor parallelism exactly where the activations are replicas, and differ over data and context parallelism.
A named stream is entered with `get_rng_tracker().fork(name)`; outside, the default generators (CPU, and the CUDA device if there
is one) are the default stream. Initial weights use none of these: see `megatron.core.param_init`.
"""

import contextlib
import random
import struct
from collections.abc import Iterator

import numpy as np
import torch

from megatron.core.errors import CheckpointError, ParallelStateError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.seeding import derive_seed

MODEL_PARALLEL_RNG = "model-parallel-rng"
EXPERT_PARALLEL_RNG = "expert-parallel-rng"

_GeneratorStates = dict[str, torch.Tensor]  # "cpu" and, with a GPU, "cuda" -> uint8 state


class RngTracker:
    """Named random streams beside the default one. A stream is the states of the default generators while it is entered."""

    def __init__(self) -> None:
        self._streams: dict[str, _GeneratorStates] = {}

    def reset(self) -> None:
        """Forget all streams."""
        self._streams = {}

    def is_initialized(self) -> bool:
        """Whether there are streams."""
        return bool(self._streams)

    def names(self) -> list[str]:
        """Names of the streams."""
        return list(self._streams)

    def add(self, name: str, seed: int) -> None:
        """A new stream with this seed. Raises ParallelStateError if the name is taken."""
        if name in self._streams:
            raise ParallelStateError(f"random stream {name!r} exists already; reset() the tracker first")
        current = _generator_states()
        _seed_generators(seed)
        self._streams[name] = _generator_states()
        _set_generator_states(current)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Inside, random numbers come from the stream `name`; the default stream does not advance.

        Raises ParallelStateError for an unknown name.
        """
        if name not in self._streams:
            raise ParallelStateError(
                f"random stream {name!r} does not exist; call model_parallel_seed(seed) first (known: {self.names()})"
            )
        current = _generator_states()
        _set_generator_states(self._streams[name])
        try:
            yield
        finally:
            self._streams[name] = _generator_states()
            _set_generator_states(current)

    def get_states(self) -> dict[str, _GeneratorStates]:
        """Copies of all streams."""
        return {name: {kind: state.clone() for kind, state in states.items()} for name, states in self._streams.items()}

    def set_states(self, states: dict[str, _GeneratorStates]) -> None:
        """Replace all streams."""
        self._streams = {name: {kind: state.clone() for kind, state in own.items()} for name, own in states.items()}

    def recompute_contexts(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """`context_fn` for torch.utils.checkpoint: named streams repeat their numbers in the recomputation.

        torch restores the default stream itself. Afterwards the streams go on from where they were before the recomputation.
        """
        before = self.get_states()
        return contextlib.nullcontext(), self._from(before)

    @contextlib.contextmanager
    def _from(self, states: dict[str, _GeneratorStates]) -> Iterator[None]:
        current = self.get_states()
        self.set_states(states)
        try:
            yield
        finally:
            self.set_states(current)


_tracker = RngTracker()


def get_rng_tracker() -> RngTracker:
    """This rank's named streams."""
    return _tracker


def rng_fork(fork: bool, name: str = MODEL_PARALLEL_RNG) -> contextlib.AbstractContextManager[None]:
    """The stream `name` if `fork`, else the default stream: for dropout on activations that may be split over tensor ranks."""
    return _tracker.fork(name) if fork else contextlib.nullcontext()


def get_cuda_rng_tracker() -> RngTracker:
    """Megatron's name for `get_rng_tracker`."""
    return _tracker


def model_parallel_seed(seed: int, groups: ProcessGroupCollection | None = None) -> None:
    """Seed the default stream, the named streams, Python's `random` and NumPy's global state of this rank.

    groups: process groups; default: those that initialize_model_parallel installed.
    """
    groups = ProcessGroupCollection.resolve(groups)
    replica = (groups.rank("pp"), groups.rank("dp"), groups.rank("cp"))
    experts = (groups.rank("pp"), groups.rank("expt_dp"), groups.rank("ep"), groups.rank("expt_tp"))
    _seed_generators(derive_seed(seed, "dropout", *replica))
    random.seed(derive_seed(seed, "python", *replica))
    np.random.seed(derive_seed(seed, "numpy", *replica) % 2**32)
    _tracker.reset()
    _tracker.add(MODEL_PARALLEL_RNG, derive_seed(seed, MODEL_PARALLEL_RNG, *replica, groups.rank("tp")))
    _tracker.add(EXPERT_PARALLEL_RNG, derive_seed(seed, EXPERT_PARALLEL_RNG, *experts))


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Megatron's name for `model_parallel_seed` with the installed groups."""
    model_parallel_seed(seed)


def rng_state() -> dict[str, torch.Tensor]:
    """All random state of this rank, as 1-D uint8 CPU tensors of a length that depends on the key only.

    Keys: `cpu`, `cuda` (with a GPU), `stream.<name>.cpu`, `stream.<name>.cuda`, `python`, `numpy`. Copies.
    """
    state = {kind: tensor.clone() for kind, tensor in _generator_states().items()}
    for name, states in _tracker.get_states().items():
        state.update({f"stream.{name}.{kind}": tensor for kind, tensor in states.items()})
    state["python"] = _to_bytes(_PYTHON, *_python_fields())
    state["numpy"] = _to_bytes(_NUMPY, *_numpy_fields())
    return state


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    """Restore what `rng_state` gave; streams that `state` does not name are left alone.

    Raises CheckpointError, and changes nothing, when a key or a length is not this process's.
    """
    expected = rng_state()
    for key, tensor in state.items():
        known = expected.get(key)
        if known is None:
            raise CheckpointError(f"random state {key!r} does not exist in this process (it has {', '.join(expected)})")
        if tensor.dtype != torch.uint8 or tensor.shape != known.shape:
            raise CheckpointError(
                f"random state {key!r} should be uint8 {list(known.shape)}, is {tensor.dtype!s} {list(tensor.shape)}"
            )
    state = {key: tensor.detach().cpu().clone() for key, tensor in state.items()}
    if "python" in state:
        _set_python(*struct.unpack(_PYTHON, state["python"].numpy().tobytes()))
    if "numpy" in state:
        _set_numpy(*struct.unpack(_NUMPY, state["numpy"].numpy().tobytes()))
    _set_generator_states({key: state[key] for key in ("cpu", "cuda") if key in state})
    _set_streams(state)


def _set_streams(state: dict[str, torch.Tensor]) -> None:
    streams = _tracker.get_states()
    for name, own in streams.items():
        own.update({kind: state[f"stream.{name}.{kind}"] for kind in own if f"stream.{name}.{kind}" in state})
    _tracker.set_states(streams)


# The default generators: CPU, and the current CUDA device


def _has_cuda() -> bool:
    return torch.cuda.is_available()


def _seed_generators(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if _has_cuda():
        torch.cuda.manual_seed(seed)


def _generator_states() -> _GeneratorStates:
    states = {"cpu": torch.get_rng_state()}
    if _has_cuda():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_generator_states(states: _GeneratorStates) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


# Python and NumPy, as records of fixed length: 624 words, position, whether a second normal value waits, that value

_PYTHON = "<624II?d"
_NUMPY = "<624II?d"
_PYTHON_VERSION = 3  # of the state's form; random.setstate refuses others


def _to_bytes(form: str, *fields: int | float | bool) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack(form, *fields)), dtype=torch.uint8).clone()


def _python_fields() -> list[int | float | bool]:
    version, words, waiting = random.getstate()
    assert version == _PYTHON_VERSION and len(words) == 625, (version, len(words))
    return [*words, waiting is not None, waiting or 0.0]


def _set_python(*fields: int | float | bool) -> None:
    *words, has_waiting, waiting = fields
    random.setstate((_PYTHON_VERSION, tuple(words), waiting if has_waiting else None))


def _numpy_fields() -> list[int | float | bool]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict) and state["bit_generator"] == "MT19937", state
    inner = state["state"]
    return [*map(int, inner["key"]), int(inner["pos"]), bool(state["has_gauss"]), float(state["gauss"])]


def _set_numpy(*fields: int | float | bool) -> None:
    *words, has_gauss, gauss = fields
    inner = {"key": np.array(words[:624], dtype=np.uint32), "pos": int(words[624])}
    np.random.set_state({"bit_generator": "MT19937", "state": inner, "has_gauss": int(has_gauss), "gauss": gauss})

"""Random streams of a rank: dropout that differs where data differs, and exact capture of every generator.

Two streams: the default one draws dropout on activations that are replicated over tensor parallelism (so it must agree there), the
named stream `model-parallel-rng` draws on activations that are sharded over it. Both differ over pipeline, data and context parallel
ranks. Weights use neither: their values come from the seed and the parameter's name.
"""

import contextlib
import io
import random
from collections.abc import Iterator

import numpy as np
import torch

from megatron.core.errors import CheckpointError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.seeding import derive_seed

MODEL_PARALLEL_STREAM = "model-parallel-rng"


class RngTracker:
    """Named generator states of the current device type; `fork(name)` draws from one and leaves the default stream untouched."""

    def __init__(self) -> None:
        self._states: dict[str, dict[str, torch.Tensor]] = {}

    def add(self, name: str, seed: int) -> None:
        """Create (or reset) a stream."""
        before = _device_states()
        torch.manual_seed(seed)
        self._states[name] = _device_states()
        _set_device_states(before)

    def names(self) -> list[str]:
        """Known streams."""
        return sorted(self._states)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STREAM) -> Iterator[None]:
        """Draw from the stream `name` inside the block; KeyError if it was never added."""
        state = self._states[name]
        before = _device_states()
        _set_device_states(state)
        try:
            yield
        finally:
            self._states[name] = _device_states()
            _set_device_states(before)

    def states(self) -> dict[str, torch.Tensor]:
        """All streams as uint8 tensors, keyed `stream.<name>.<device>`."""
        return {f"stream.{name}.{device}": value for name, state in self._states.items() for device, value in state.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Inverse of `states`; other keys are ignored."""
        for key, value in states.items():
            if key.startswith("stream."):
                name, device = key.removeprefix("stream.").rsplit(".", 1)
                self._states.setdefault(name, {})[device] = value


_TRACKER = RngTracker()


def get_rng_tracker() -> RngTracker:
    """The process's named streams."""
    return _TRACKER


def model_parallel_seed(seed: int, groups: ProcessGroupCollection | None = None) -> None:
    """Seed all generators of this rank from the run's seed and the rank's coordinates."""
    groups = ProcessGroupCollection.resolve(groups)
    place = (groups.rank("pp"), groups.rank("dp"), groups.rank("cp"))
    default = derive_seed(seed, "dropout", *place)
    random.seed(default)
    np.random.seed(default % 2**32)
    _TRACKER.add(MODEL_PARALLEL_STREAM, derive_seed(seed, "dropout", *place, "tp", groups.rank("tp")))
    torch.manual_seed(default)


def _device_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_device_states(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def rng_state() -> dict[str, torch.Tensor]:
    """Every generator of this process as uint8 tensors: torch (cpu, cuda), named streams, Python's `random`, NumPy's legacy one."""
    version, words, gauss = random.getstate()
    assert version == 3
    python = np.array([*words], dtype=np.uint64), np.array([np.nan if gauss is None else gauss])
    _, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    numpy = np.asarray(keys, dtype=np.uint32), np.array([position, has_gauss], dtype=np.int64), np.array([cached])
    states = {f"torch.{device}": state for device, state in _device_states().items()}
    states |= _TRACKER.states()
    return {**states, "python": _pack(python), "numpy": _pack(numpy)}


def set_rng_state(states: dict[str, torch.Tensor]) -> None:
    """Inverse of `rng_state`. Raises CheckpointError when a part is missing."""
    missing = [key for key in ("torch.cpu", "python", "numpy") if key not in states]
    if missing:
        raise CheckpointError(f"random-number state lacks {', '.join(missing)}")
    words, gauss = _unpack(states["python"])
    random.setstate((3, tuple(int(word) for word in words), None if np.isnan(gauss[0]) else float(gauss[0])))
    keys, places, cached = _unpack(states["numpy"])
    np.random.set_state(("MT19937", keys, int(places[0]), int(places[1]), float(cached[0])))
    _TRACKER.set_states(states)
    _set_device_states({key.removeprefix("torch."): value for key, value in states.items() if key.startswith("torch.")})


def _pack(arrays: tuple[np.ndarray, ...]) -> torch.Tensor:
    """Arrays as one uint8 tensor (NumPy's own format, no pickle)."""
    stream = io.BytesIO()
    np.savez(stream, *arrays)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def _unpack(packed: torch.Tensor) -> list[np.ndarray]:
    with np.load(io.BytesIO(packed.numpy().tobytes()), allow_pickle=False) as archive:
        return [archive[name] for name in archive.files]

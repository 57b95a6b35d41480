"""How main params and moments lie in memory: as they are, in 16 bit, or as what bf16 parameters lack of fp32 main params.

    Plain       one number of any float dtype per element; a bf16 main param can be the bf16 parameter itself
    Scaled      fp16, and for each row of 32 elements a power of two (int8): fp16's precision with fp32's range
    Remainder   int16: fp32 main param - bf16 parameter, in units of the main param's last place; exact

Updates are done in fp32, a cache's worth of elements at a time (`update_in_blocks`). Rows lie alike in every layout: parameters begin
at multiples of 64 elements, shards at multiples of 32.
"""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.distributed.param_layout import PARAM_ALIGNMENT, SHARD_ALIGNMENT
from megatron.core.optimizer.optimizer_config import STATE_DTYPES, OptimizerConfig
from megatron.core.optimizer.update_rules import UpdateRule
from megatron.core.seeding import derive_seed

_BLOCK = {"cpu": 1 << 16, "cuda": 1 << 24}  # elements in fp32 at a time: what stays in the cache, what fills a GPU
_LARGEST_EXPONENT = 14  # of a row's largest fp16 number: one below fp16's own, so that rounding up fits
_SMALLEST_SCALE = -126  # fp32's smallest normal power of two


class Stored(ABC):
    """Values of consecutive elements. Reads and writes are in fp32; a range begins at a multiple of 32."""

    def __init__(self, numel: int, nbytes: int) -> None:
        self.numel, self.nbytes = numel, nbytes  # nbytes: without memory that belongs to the model

    @property
    def live(self) -> torch.Tensor | None:
        """1-D memory that holds the values as they are; None if they have to be computed."""
        return None

    @property
    @abstractmethod
    def form(self) -> str:
        """The form's name, for messages."""

    @abstractmethod
    def read(self, start: int, out: torch.Tensor) -> None:
        """out = values [start, start + len(out))."""

    @abstractmethod
    def write(self, start: int, values: torch.Tensor, bits: torch.Tensor | None = None) -> None:
        """Take `values` (scratch memory afterwards), rounded to nearest or, with `bits`, stochastically. bits: int32, 16 random bits."""

    def values(self) -> torch.Tensor:
        """All values: live memory, or a new fp32 tensor."""
        if self.live is not None:
            return self.live
        out = torch.empty(self.numel, dtype=torch.float32, device=self._device())
        self.read(0, out)
        return out

    def assign(self, values: torch.Tensor) -> None:
        """Take all values from a 1-D tensor of any float dtype."""
        if self.live is not None:
            self.live.copy_(values)
        else:
            self.write(0, values.to(self._device(), torch.float32, copy=True))

    @abstractmethod
    def _device(self) -> torch.device: ...


class Plain(Stored):
    """Numbers as they are. owned: False for memory of the model."""

    def __init__(self, data: torch.Tensor, owned: bool = True) -> None:
        super().__init__(data.numel(), data.nbytes if owned else 0)
        self.data = data

    @property
    def live(self) -> torch.Tensor:
        """The memory itself."""
        return self.data

    @property
    def form(self) -> str:
        """The dtype."""
        return str(self.data.dtype).removeprefix("torch.")

    def read(self, start: int, out: torch.Tensor) -> None:
        """See `Stored`."""
        out.copy_(self.data[start : start + out.numel()])

    def write(self, start: int, values: torch.Tensor, bits: torch.Tensor | None = None) -> None:
        """See `Stored`."""
        if bits is not None and self.data.dtype == torch.bfloat16:  # the dropped 16 bits carry with probability dropped / 2**16
            values.view(torch.int32).add_(bits).bitwise_and_(-(1 << 16))
        self.data[start : start + values.numel()].copy_(values)

    def _device(self) -> torch.device:
        return self.data.device


class Scaled(Stored):
    """fp16 numbers times a power of two per row of 32 elements. codes: [n] fp16. exponents: [ceil(n / 32)] int8."""

    form = "fp16 in rows"

    def __init__(self, codes: torch.Tensor, exponents: torch.Tensor) -> None:
        super().__init__(codes.numel(), codes.nbytes + exponents.nbytes)
        self.codes, self.exponents = codes, exponents

    def read(self, start: int, out: torch.Tensor) -> None:
        """See `Stored`."""
        out.copy_(self.codes[start : start + out.numel()])
        out.mul_(_per_element(_power_of_two(self._rows(start, out.numel()).to(torch.int32)), out.numel()))

    def write(self, start: int, values: torch.Tensor, bits: torch.Tensor | None = None) -> None:
        """See `Stored`. Values that were read are written back as they were."""
        numel = values.numel()
        scale = _row_exponents(values)
        self._rows(start, numel).copy_(scale)
        values.mul_(_per_element(_power_of_two(-scale), numel))
        if bits is not None:
            _round_to_fp16(values, bits)
        self.codes[start : start + numel].copy_(values)

    def _rows(self, start: int, numel: int) -> torch.Tensor:
        first = start // SHARD_ALIGNMENT
        return self.exponents[first : first + -(-numel // SHARD_ALIGNMENT)]

    def _device(self) -> torch.device:
        return self.codes.device


class Remainder(Stored):
    """fp32 values whose bf16 rounding is the model's parameter. model: [n] bf16. low: [n] int16.

    Rounding to nearest, ties to even, leaves between -2**15 and 2**15 of the last 16 bits: one number more than int16 has. The
    elements with +2**15, about one in 2**17, are stored as -2**15 and listed in `ties`.
    """

    form = "bf16 parameters and remainders"

    def __init__(self, model: torch.Tensor, low: torch.Tensor) -> None:
        super().__init__(low.numel(), low.nbytes)
        self.model, self.low = model, low
        self.ties = torch.empty(0, dtype=torch.int64, device=low.device)  # ascending

    def read(self, start: int, out: torch.Tensor) -> None:
        """See `Stored`."""
        part, bits = slice(start, start + out.numel()), out.view(torch.int32)
        out.copy_(self.model[part])
        bits.add_(self.low[part])
        if self.ties.numel():
            bits[self._ties_in(start, part.stop) - start] += 1 << 16

    def write(self, start: int, values: torch.Tensor, bits: torch.Tensor | None = None) -> None:
        """See `Stored`. Nothing is rounded but the model's parameters, to nearest."""
        part = slice(start, start + values.numel())
        self.model[part].copy_(values)
        rest = values.view(torch.int32).sub_(self.model[part].float().view(torch.int32))
        self.low[part].copy_(rest)
        if self.ties.numel() or int(rest.amax()) == 1 << 15:
            found = torch.nonzero(rest == 1 << 15).view(-1)
            before, after = self.ties[self.ties < start], self.ties[self.ties >= part.stop]
            self.ties = torch.cat([before, found + start, after])

    def _ties_in(self, start: int, stop: int) -> torch.Tensor:
        return self.ties[(self.ties >= start) & (self.ties < stop)]

    def _device(self) -> torch.device:
        return self.low.device


def _per_element(rows: torch.Tensor, numel: int) -> torch.Tensor:
    return rows.repeat_interleave(SHARD_ALIGNMENT)[:numel]


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """fp32 2**e of int32 exponents in [-126, 127]."""
    return ((exponents + 127) << 23).view(torch.float32)


def _row_exponents(values: torch.Tensor) -> torch.Tensor:
    """int32 [rows]: the power of two by which fp16 numbers of a row are to be multiplied.

    A largest value that rounding may carry to the next power of two counts as that one, so that what is stored gives the same values
    when it is stored again.
    """
    rows = -(-values.numel() // SHARD_ALIGNMENT)
    magnitude = values.new_zeros(rows * SHARD_ALIGNMENT)
    torch.abs(values, out=magnitude[: values.numel()])
    mantissa, exponent = torch.frexp(magnitude.view(rows, SHARD_ALIGNMENT).amax(dim=1))
    carries = mantissa > 1.0 - 2.0**-11
    return (exponent - 1 + carries.to(torch.int32) - _LARGEST_EXPONENT).clamp_(min=_SMALLEST_SCALE)


def _round_to_fp16(values: torch.Tensor, bits: torch.Tensor) -> None:
    """Round to a neighbour among the fp16 numbers, in place. bits: 16 random bits, of which 13 are what fp16 drops."""
    noise = bits & 0x1FFF
    whole = values.abs().mul_(2.0**24).add_(noise.float().mul_(2.0**-13)).floor_().mul_(2.0**-24).copysign_(values)
    small = values.abs() < 2.0**-14  # fp16 has no more bits there than multiples of 2**-24
    values.view(torch.int32).add_(noise).bitwise_and_(-(1 << 13))
    values.copy_(torch.where(small, whole, values))


# Stochastic rounding


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Random bits that depend on seed, step, value (`exp_avg` ...), the parameter's name and the element's position in it alone."""

    seed: int

    def bits(self, value: str, name: str, step: int, start: int, like: torch.Tensor) -> torch.Tensor:
        """int32, 16 random bits for each of the elements [start, start + len(like))."""
        key = derive_seed(self.seed, "rounding", value, name, step)
        index = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
        return _mixed(index.add_(_as_int32(start)), key)


def _mixed(index: torch.Tensor, key: int) -> torch.Tensor:
    """16 bits of a hash of index and key (multiply, shift, exclusive or), in place."""
    index.mul_(_as_int32(0x9E3779B1)).add_(_as_int32(key))
    for shift, factor, offset in ((16, 0x7FEB352D, key >> 31), (15, 0x846CA68B, 0), (16, 0x7FEB352D, 0), (15, 0x846CA68B, 0)):
        index.bitwise_xor_((index >> shift).bitwise_and_((1 << (32 - shift)) - 1))
        index.mul_(_as_int32(factor)).add_(_as_int32(offset))
    return (index >> 16).bitwise_and_(0xFFFF)


def _as_int32(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


# What a configuration asks for


def form_of(config: OptimizerConfig, value: str, params_dtype: torch.dtype) -> str:
    """model, remainder, fp32, fp16 or bf16: how the values `main_param`, `exp_avg` or `exp_avg_sq` of such parameters are kept."""
    wide = params_dtype.itemsize >= 4
    if value != "main_param":
        return str(getattr(config, f"{value}_dtype"))
    if wide or (config.main_params_dtype == "bf16" and params_dtype == torch.bfloat16):
        return "model"
    return "remainder" if config.remainders and params_dtype == torch.bfloat16 else config.main_params_dtype


def bytes_of(config: OptimizerConfig, value: str, params_dtype: torch.dtype, numel: int) -> int:
    """Bytes beside the model for `numel` consecutive elements."""
    if not config.use_precision_aware_optimizer:
        return 0 if value == "main_param" and params_dtype.itemsize >= 4 else 4 * numel
    form = form_of(config, value, params_dtype)
    rows = -(-numel // SHARD_ALIGNMENT) if form == "fp16" else 0
    return {"model": 0, "remainder": 2, "fp32": 4, "fp16": 2, "bf16": 2}[form] * numel + rows


class StoredFlats:
    """Memory of the values of consecutive elements of the model, and each parameter's part of it.

    Args:
        model: flat parameters. names: main_param and states.
    """

    def __init__(self, config: OptimizerConfig, model: torch.Tensor, names: Sequence[str]) -> None:
        self.model = model
        self.form = {name: form_of(config, name, model.dtype) for name in names}
        self.memory = {name: _allocate(self.form[name], model) for name in names}
        cut = self.cut(slice(0, model.numel()))
        self.nbytes = {name: stored.nbytes for name, stored in cut.items()}
        if self.form["main_param"] in ("fp32", "fp16", "bf16"):
            cut["main_param"].assign(model)

    def cut(self, part: slice) -> dict[str, Stored]:
        """The values of elements [start, stop); start is a multiple of 32."""
        rows = slice(part.start // SHARD_ALIGNMENT, -(-part.stop // SHARD_ALIGNMENT))
        stored: dict[str, Stored] = {}
        for name, tensors in self.memory.items():
            if self.form[name] == "model":
                stored[name] = Plain(self.model[part], owned=False)
            elif self.form[name] == "remainder":
                stored[name] = Remainder(self.model[part], tensors[0][part])
            elif self.form[name] == "fp16":
                stored[name] = Scaled(tensors[0][part], tensors[1][rows])
            else:
                stored[name] = Plain(tensors[0][part])
        return stored


def _allocate(form: str, model: torch.Tensor) -> list[torch.Tensor]:
    if form == "model":
        return []
    if form == "remainder":
        return [torch.zeros_like(model, dtype=torch.int16)]
    data = [torch.zeros_like(model, dtype=STATE_DTYPES[form])]
    if form == "fp16":
        data.append(torch.full((-(-model.numel() // SHARD_ALIGNMENT),), _SMALLEST_SCALE, dtype=torch.int8, device=model.device))
    return data


# Updates


@dataclasses.dataclass(frozen=True)
class BlockwiseParam:
    """A parameter's part to be updated in blocks.

    stored: main_param and states. model: the flat parameters it belongs to; written unless main_param's form does so itself.
    grad: 1-D, fp32 or 16 bit. noise_name: what the random bits depend on. start: position of the part in the whole parameter.
    """

    stored: Mapping[str, Stored]
    model: torch.Tensor
    grad: torch.Tensor
    noise_name: str
    start: int

    @property
    def copies_to_model(self) -> bool:
        """Whether main params lie beside the model's parameters, whole."""
        main = self.stored["main_param"]
        return isinstance(main, Scaled) or (isinstance(main, Plain) and main.nbytes > 0)

    def write_model(self) -> None:
        """Main params -> model parameters."""
        if self.copies_to_model:
            self.model.copy_(self.stored["main_param"].values())

    def read_model(self) -> None:
        """Model parameters -> main params."""
        if self.stored["main_param"].nbytes:
            self.stored["main_param"].assign(self.model)


def update_in_blocks(
    rule: UpdateRule, params: Sequence[BlockwiseParam], group: Mapping[str, Any], divisor: float, rounding: Rounding | None
) -> None:
    """One step of `rule` on parameters of one group, in fp32 and block by block; also writes the model's parameters.

    rounding: None = 16-bit values are rounded to nearest.
    """
    for batch in _batches(params):
        mains: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        states: dict[str, list[torch.Tensor]] = {name: [] for name in params[0].stored if name != "main_param"}
        cursor = 0
        for param, start, stop in batch:
            window = slice(cursor, cursor + stop - start)
            cursor += -(-(stop - start) // PARAM_ALIGNMENT) * PARAM_ALIGNMENT
            for name, stored in param.stored.items():
                (mains if name == "main_param" else states[name]).append(_loaded(name, stored, start, stop, window))
            grads.append(_loaded("grad", Plain(param.grad), start, stop, window))
        rule.update(mains, grads, states, group, divisor)
        for index, (param, start, stop) in enumerate(batch):
            for name, stored in param.stored.items():
                _put_back(param, name, stored, start, (mains if name == "main_param" else states[name])[index], group, rounding)
            if param.copies_to_model:
                main = mains[index]
                param.stored["main_param"].read(start, main)
                param.model[start:stop].copy_(main)


def _loaded(name: str, stored: Stored, start: int, stop: int, window: slice) -> torch.Tensor:
    """fp32 values: live memory where it is fp32, else a part of the scratch memory of that name."""
    live = stored.live
    if live is not None and live.dtype == torch.float32:
        return live[start:stop]
    device = stored._device()
    out = _scratch(name, device)[window]
    stored.read(start, out)
    return out


def _put_back(
    param: BlockwiseParam, name: str, stored: Stored, start: int, values: torch.Tensor, group: Mapping[str, Any], rounding: Rounding | None
) -> None:
    live = stored.live
    if live is not None and live.dtype == torch.float32:
        return
    bits = None
    if rounding is not None and not isinstance(stored, Remainder):
        bits = rounding.bits(name, param.noise_name, group["step"], param.start + start, values)
    stored.write(start, values, bits)


def _batches(params: Sequence[BlockwiseParam]) -> Iterator[list[tuple[BlockwiseParam, int, int]]]:
    """(parameter, start, stop) pieces, together at most a block."""
    batch: list[tuple[BlockwiseParam, int, int]] = []
    held = 0
    for param in params:
        block = _block(param.model.device)
        for start in range(0, param.model.numel(), block):
            stop = min(start + block, param.model.numel())
            size = -(-(stop - start) // PARAM_ALIGNMENT) * PARAM_ALIGNMENT
            if batch and held + size > block:
                yield batch
                batch, held = [], 0
            batch.append((param, start, stop))
            held += size
    if batch:
        yield batch


def _block(device: torch.device) -> int:
    return _BLOCK.get(device.type, _BLOCK["cuda"])


@functools.cache
def _scratch(name: str, device: torch.device) -> torch.Tensor:
    return torch.empty(_block(device), dtype=torch.float32, device=device)

"""From a table of raw tensors to weights: codes, scales and biases joined under one canonical name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lily_py.checkpoint.layout import canonical_name
from lily_py.checkpoint.quantization import Quantization, QuantizationTable, check_shapes
from lily_py.checkpoint.safetensors_header import TensorSlice
from lily_py.errors import CheckpointError

_FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Weight:
    """One weight of the model, plain or quantised.

    Attributes:
        name: canonical name, such as ``layers.0.linear_attn.in_proj_qkv``.
        source: name of `data` in its file.
        data: the values, or the packed codes (U32) of a quantised weight.
        scales: one a group of inputs; quantised only.
        biases: one a group of inputs; affine only.
        quantization: the number format, or None for plain values.
    """

    name: str
    source: str
    data: TensorSlice
    scales: TensorSlice | None = None
    biases: TensorSlice | None = None
    quantization: Quantization | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, codes unpacked: [..., out, in]."""
        if self.quantization is None:
            return self.data.shape
        return (*self.data.shape[:-1], self.data.shape[-1] * 32 // self.quantization.bits)

    @property
    def slices(self) -> tuple[TensorSlice, ...]:
        """The tensors that make up the weight."""
        return tuple(part for part in (self.data, self.scales, self.biases) if part is not None)

    @property
    def nbytes(self) -> int:
        """Bytes in the files: values, or codes, scales and biases."""
        return sum(part.nbytes for part in self.slices)


def build_weights(
    tensors: Mapping[str, TensorSlice],
    quantization: Callable[[str], QuantizationTable],
    rename: Callable[[str], str] = canonical_name,
) -> dict[str, Weight]:
    """Join raw tensors into weights and check each against the declared format.

    Args:
        tensors: source name -> slice.
        quantization: canonical name -> the table that speaks for it.
        rename: source name -> canonical name.

    Raises:
        CheckpointError: two tensors of one name, parts without a whole, formats that don't fit.
    """
    sources: dict[str, str] = {}
    parts: dict[str, dict[str, TensorSlice]] = {"scales": {}, "biases": {}}
    for source, tensor in tensors.items():
        base, _, suffix = source.rpartition(".")
        if suffix in parts:
            _put(parts[suffix], rename(base), tensor, source)
        elif sources.setdefault(rename(source), source) != source:
            raise CheckpointError(f"{source} and {sources[rename(source)]} are two spellings of one tensor")

    for suffix, table in parts.items():
        for name in table:
            if name not in sources:
                raise CheckpointError(f"{name}: has {suffix} but no weight")
    return {
        name: _weight(
            name,
            source,
            tensors[source],
            parts["scales"].get(name),
            parts["biases"].get(name),
            quantization(name),
        )
        for name, source in sources.items()
    }


def _put(table: dict[str, TensorSlice], name: str, tensor: TensorSlice, source: str) -> None:
    if name in table:
        raise CheckpointError(f"{source}: a second tensor for {name}")
    table[name] = tensor


def _weight(
    name: str,
    source: str,
    data: TensorSlice,
    scales: TensorSlice | None,
    biases: TensorSlice | None,
    table: QuantizationTable,
) -> Weight:
    if scales is None:
        if biases is not None:
            raise CheckpointError(f"{source}: has biases but no scales")
        if data.dtype not in _FLOATS:
            raise CheckpointError(
                f"{source}: {data.dtype} {list(data.shape)} without scales is no weight that lily can read; "
                "unquantised weights are BF16, F16 or F32"
            )
        return Weight(name, source, data)
    declared = table.lookup(name)
    if declared is None:
        raise CheckpointError(f"{source}: has scales, but {table.where} says that it isn't quantised")
    check_shapes(source, declared, data, scales, biases, table.where)
    return Weight(name, source, data, scales, biases, declared)

"""Number formats of quantised weights: what the configuration declares, checked against what the files hold.

An affine weight is ``scale * code + bias`` for each group of `group_size` inputs; the microscaling formats
(mxfp4, mxfp8, nvfp4) have small floating-point codes and an 8-bit scale a group, without bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from lily_py.checkpoint.fields import Fields
from lily_py.checkpoint.layout import canonical_name
from lily_py.checkpoint.safetensors_header import TensorSlice
from lily_py.errors import CheckpointError, UnsupportedModelError

Mode = Literal["affine", "mxfp4", "mxfp8", "nvfp4"]

# mode -> allowed bits, allowed group sizes; the first of each is the default.
_FORMATS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((4, 2, 3, 5, 6, 8), (64, 32, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
_FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Quantization:
    """The format of one quantised weight: mode, bits a code, inputs a group."""

    mode: Mode
    bits: int
    group_size: int

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}-bit, groups of {self.group_size}"


class QuantizationTable:
    """What a configuration says about quantisation: a default and overrides by canonical tensor name.

    Args:
        default: the global format, or None if the checkpoint isn't quantised.
        overrides: canonical name -> format, or None for a tensor that is left unquantised.
        where: path of the configuration, for errors.
    """

    def __init__(
        self, default: Quantization | None, overrides: Mapping[str, Quantization | None], where: str
    ) -> None:
        self.default = default
        self.overrides = overrides
        self.where = where

    def lookup(self, name: str) -> Quantization | None:
        """Return the declared format of a canonical tensor name; None is unquantised."""
        return self.overrides.get(name, self.default)


def parse_quantization(config: Mapping[str, Any], where: str) -> QuantizationTable:
    """Read ``quantization`` (or ``quantization_config``) of a `config.json` or of its ``text_config``.

    Overrides are keyed by the path of a tensor in any spelling; each is true (the default), false
    (unquantised) or an object, whose missing fields come from the default where the modes agree, else from
    its own mode.

    Raises:
        UnsupportedModelError: the format of another toolkit (``quant_method``).
        CheckpointError: bits, group sizes or modes that don't exist.
    """
    text_config = config.get("text_config")
    for place in (config, text_config if isinstance(text_config, Mapping) else {}):
        for key in ("quantization", "quantization_config"):
            declared = place.get(key)
            if declared is None:
                continue
            if not isinstance(declared, Mapping):
                raise Fields(place, where).error(key, "an object")
            return parse_declaration(declared, f"{where}: {key}")
    return QuantizationTable(None, {}, where)


def parse_declaration(declared: Mapping[str, Any], where: str) -> QuantizationTable:
    """Read one quantisation object: the global format and its overrides."""
    method = declared.get("quant_method")
    if method is not None:
        raise UnsupportedModelError(
            f"{where}: quantised with quant_method {method!r}; lily reads MLX's formats and unquantised "
            "weights, so take an MLX conversion of this model or convert the original with mlx_lm.convert"
        )
    default = _format(Fields(declared, where), None)
    overrides: dict[str, Quantization | None] = {}
    for path, value in declared.items():
        if not isinstance(value, bool | Mapping) and "." not in path:
            continue
        entry = f"{where}: {path}"
        if isinstance(value, Mapping):
            override: Quantization | None = _format(Fields(value, entry), default)
        elif isinstance(value, bool):
            override = default if value else None
        else:
            raise CheckpointError(f"{entry} must be an object, true or false, got {value!r}")
        name = canonical_name(path)
        if overrides.setdefault(name, override) != override:
            raise CheckpointError(f"{entry} contradicts another override of the same tensor")
    return QuantizationTable(default, overrides, where)


def _format(fields: Fields, default: Quantization | None) -> Quantization:
    mode = fields.text("mode", default=default.mode if default else "affine")
    if mode not in _FORMATS:
        raise UnsupportedModelError(
            f"{fields.where}: mode {mode!r} isn't supported, only " + ", ".join(_FORMATS)
        )
    all_bits, all_groups = _FORMATS[mode]
    inherited = (
        default
        if default and default.mode == mode
        else Quantization(cast(Mode, mode), all_bits[0], all_groups[0])
    )
    bits = fields.integer("bits", 1, 64, default=inherited.bits)
    group_size = fields.integer("group_size", 1, 1 << 16, default=inherited.group_size)
    if bits not in all_bits:
        raise fields.error("bits", f"one of {sorted(all_bits)} in mode {mode}")
    if group_size not in all_groups:
        raise fields.error("group_size", f"one of {sorted(all_groups)} in mode {mode}")
    return Quantization(cast(Mode, mode), bits, group_size)


def check_shapes(
    source: str,
    declared: Quantization,
    data: TensorSlice,
    scales: TensorSlice,
    biases: TensorSlice | None,
    where: str,
) -> None:
    """Check that codes, scales and biases of a tensor fit the declared format.

    Args:
        source: the tensor's name in the file.
        declared: what the configuration says.
        data: codes, U32 [..., out, in * bits / 32].
        scales: [..., out, in / group_size], floats (affine) or U8.
        biases: as scales; affine only.
        where: the configuration's path.

    Raises:
        CheckpointError: names the tensor, what was expected and what was found.
    """
    affine = declared.mode == "affine"
    if data.dtype != "U32" or len(data.shape) < 2:
        raise CheckpointError(f"{source}: codes must be U32 of two or more dimensions, got {_shown(data)}")
    if affine != (biases is not None):
        problem = (
            "has no biases, which mode affine needs" if affine else "has biases, which this mode doesn't use"
        )
        raise CheckpointError(f"{source}: declared as {declared} by {where}, but {problem}")
    if (scales.dtype in _FLOATS) != affine or (not affine and scales.dtype != "U8"):
        expected = "BF16, F16 or F32" if affine else "U8"
        raise CheckpointError(f"{source}: scales of {declared} must be {expected}, got {scales.dtype}")
    if biases is not None and (biases.shape, biases.dtype) != (scales.shape, scales.dtype):
        raise CheckpointError(f"{source}: biases {_shown(biases)} differ from scales {_shown(scales)}")
    if scales.shape[:-1] != data.shape[:-1]:
        raise CheckpointError(f"{source}: scales {_shown(scales)} don't fit codes {_shown(data)}")
    inputs = scales.shape[-1] * declared.group_size
    if data.shape[-1] * 32 != inputs * declared.bits or not inputs:
        found = data.shape[-1] * 32 / inputs if inputs else 0
        raise CheckpointError(
            f"{source}: declared as {declared} by {where}, so scales {list(scales.shape)} mean "
            f"{inputs} inputs and {inputs * declared.bits / 32:g} words a row; "
            f"got {data.shape[-1]} words, which would be {found:g} bits"
        )


def _shown(tensor: TensorSlice) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"

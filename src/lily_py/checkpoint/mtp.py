"""The multi-token-prediction (MTP) head outside the checkpoint's own files: finding and judging it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lily_py.checkpoint.config import MTP_SIDECAR_MODEL_TYPE, ModelConfig
from lily_py.checkpoint.fields import read_json
from lily_py.checkpoint.files import (
    DESCRIPTION_PATTERNS,
    INDEX_NAME,
    existing_path,
    list_shards,
    read_weight_map,
    resolve_folder,
)
from lily_py.checkpoint.layout import canonical_name, is_mtp
from lily_py.checkpoint.norms import is_convolution, norm_shift_from_convolutions
from lily_py.checkpoint.quantization import QuantizationTable, parse_declaration, parse_quantization
from lily_py.checkpoint.safetensors_header import TensorSlice, read_header
from lily_py.checkpoint.weights import Weight
from lily_py.errors import CheckpointError, CheckpointNotFoundError

SIDECAR_NAMES = (
    "mtp.safetensors",
    "mtp/weights.safetensors",
    "mtp/model.safetensors",
    "model-mtp.safetensors",
)
_SOLE_NAMES = ("weights.safetensors", *SIDECAR_NAMES)
_REQUIRED = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
_SCALES_AND_BIASES = (".scales", ".biases")


@dataclass(frozen=True)
class Sidecar:
    """An MTP head outside the checkpoint's index.

    Attributes:
        source: the file or folder it came from.
        files: its weight files.
        tensors: source name -> slice, `file` counting from the number given at opening.
        rest: names in the same files that aren't of the head.
        rename: source name -> canonical name, ``mtp.…``.
        quantization: what its configuration says about number formats.
        norm_shift: its stored norm weights need +1.
    """

    source: str
    files: tuple[Path, ...]
    tensors: dict[str, TensorSlice]
    rest: list[str]
    rename: Callable[[str], str]
    quantization: QuantizationTable
    norm_shift: bool


def find_sidecar(folder: Path) -> Path | None:
    """Return the MTP file that lies in a checkpoint's folder beside its index, if any."""
    return next((folder / name for name in SIDECAR_NAMES if (folder / name).is_file()), None)


def mtp_quantization(config: Mapping[str, Any], where: str) -> QuantizationTable:
    """Return the formats of a checkpoint's ``mtp.*``: ``mtplx_mtp_quantization``, or those of the trunk."""
    declared = config.get("mtplx_mtp_quantization")
    if isinstance(declared, Mapping):
        return parse_declaration(declared, f"{where}: mtplx_mtp_quantization")
    return parse_quantization(config, where)


def open_sidecar(
    source: str | os.PathLike[str],
    *,
    config: ModelConfig,
    fallback: QuantizationTable,
    trunk_shift: bool | None,
    first_file: int,
    progress: bool | None = None,
) -> Sidecar:
    """Open an MTP head that was passed as ``mtp=`` or found in the folder.

    Whether its norms need +1 is told, in this order, from: a convolution in the same files; its
    configuration's model type ``qwen3_5_mtp``, quantised tensors, ``switch_mlp`` experts or names without
    ``mtp.`` (all of which only converters write, after adding 1); the base checkpoint, if it lies in its
    folder. What remains is a bare extract of an original checkpoint, whose norms are zero-centred.

    Args:
        source: a file, a folder, or a Hugging Face repository (of which only the needed files are fetched).
        config: the base model's shape.
        fallback: number formats, if the sidecar's configuration has none.
        trunk_shift: the base checkpoint's decision for a sidecar in its folder, else None.
        first_file: index of the sidecar's first file among the checkpoint's files.
        progress: as for `resolve_folder`.

    Raises:
        CheckpointError: there is no MTP head in it, or its files are damaged.
    """
    files, own_config, where = _locate(source, progress)
    tensors: dict[str, TensorSlice] = {}
    for i, path in enumerate(files):
        tensors.update(read_header(path, first_file + i))

    convolutions = {name: tensor for name, tensor in tensors.items() if is_convolution(name)}
    shift = norm_shift_from_convolutions(convolutions, config.linear_conv_kernel_dim)
    rename, head, table = _head(tensors, own_config, where, fallback)
    if not head:
        raise CheckpointError(
            f"{where}: holds no MTP head (expected mtp.fc.weight, mtp.layers.0.…); "
            "plain MLX conversions drop it, take it from the original checkpoint or a sidecar repository"
        )
    if shift is None:
        converted = own_config.get("model_type") == MTP_SIDECAR_MODEL_TYPE or _written_by_converter(head)
        shift = not converted and trunk_shift is not False
    return Sidecar(
        source=where,
        files=files,
        tensors={name: tensors[name] for name in head},
        rest=[name for name in tensors if name not in head],
        rename=rename,
        quantization=table,
        norm_shift=shift,
    )


def check_head(weights: Mapping[str, Weight], config: ModelConfig, where: str) -> int:
    """Check that an MTP head is whole and fits the model; return its number of layers.

    Raises:
        CheckpointError: a part is missing, or it belongs to a model of another width.
    """
    for name in _REQUIRED:
        if name not in weights:
            raise CheckpointError(f"{where}: the MTP head is incomplete, {name} is missing")
    layers = {name.split(".")[2] for name in weights if name.startswith("mtp.layers.")}
    if layers != {str(layer) for layer in range(len(layers))} or not layers:
        raise CheckpointError(f"{where}: the MTP head's layers are {sorted(layers)}, expected 0, 1, …")
    expected = (config.hidden_size, 2 * config.hidden_size)
    if weights["mtp.fc"].shape != expected:
        raise CheckpointError(
            f"{where}: {weights['mtp.fc'].source} is {list(weights['mtp.fc'].shape)}, expected "
            f"{list(expected)} for hidden_size {config.hidden_size}; is this the head of another model?"
        )
    return len(layers)


def is_head_part(name: str) -> bool:
    """Tell whether a canonical ``mtp.…`` name is one of the head's own, not a copy of embedding or output."""
    return name in _REQUIRED or name.startswith("mtp.layers.")


def _locate(
    source: str | os.PathLike[str], progress: bool | None
) -> tuple[tuple[Path, ...], dict[str, Any], str]:
    """Return (weight files, configuration or {}, name for errors)."""
    path = resolve_folder(source, progress=progress, patterns=DESCRIPTION_PATTERNS)
    if path.is_file():
        return (path,), _own_config(path.parent), str(path)
    names = _needed_shards(path)
    if not _is_local(source):
        # The descriptions came first, so that of a large original only the shards with the head are fetched.
        path = resolve_folder(source, progress=progress, patterns=names or ("*.safetensors",))
    if names:
        files = tuple(path / name for name in names)
    else:
        sole = next((path / name for name in _SOLE_NAMES if (path / name).is_file()), None)
        files = (sole,) if sole else list_shards(path).paths
    for file in files:
        if not file.is_file():
            raise CheckpointNotFoundError(f"{file}: promised by {INDEX_NAME} but missing")
    return files, _own_config(path), str(path)


def _is_local(source: str | os.PathLike[str]) -> bool:
    return source == "demo" or existing_path(os.fspath(source)) is not None


def _own_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return read_json(path) if path.is_file() else {}


def _needed_shards(folder: Path) -> tuple[str, ...]:
    """Return the shards that an index names for the head, and one with a convolution to tell the layout."""
    index_path = folder / INDEX_NAME
    if not index_path.is_file():
        return ()
    weight_map = read_weight_map(index_path)
    wanted = {file for name, file in weight_map.items() if is_mtp(canonical_name(name))}
    if not wanted:
        return tuple(sorted(set(weight_map.values())))
    convolutions = [file for name, file in sorted(weight_map.items()) if is_convolution(name)]
    if convolutions and not wanted.intersection(convolutions):
        wanted.add(convolutions[0])
    return tuple(sorted(wanted))


def _head(
    tensors: Iterable[str], own_config: dict[str, Any], where: str, fallback: QuantizationTable
) -> tuple[Callable[[str], str], set[str], QuantizationTable]:
    """Return (renaming, names of the head, formats), whether or not the names carry the prefix ``mtp.``."""
    names = set(tensors)
    own = parse_quantization(own_config, f"{where}: config.json")
    has_own = own.default is not None
    prefixed = {name for name in names if is_mtp(canonical_name(name))}
    if prefixed or not any(canonical_name(name) == "fc" for name in names):
        return canonical_name, prefixed, own if has_own else fallback

    def rename(name: str) -> str:
        return "mtp." + canonical_name(name)

    overrides = {"mtp." + name.removeprefix("mtp."): value for name, value in own.overrides.items()}
    table = QuantizationTable(own.default, overrides, own.where) if has_own else fallback
    return rename, {name for name in names if is_head_part(rename(_stem(name)))}, table


def _stem(name: str) -> str:
    for suffix in _SCALES_AND_BIASES:
        name = name.removesuffix(suffix)
    return name


def _written_by_converter(head: Iterable[str]) -> bool:
    return any(
        name.endswith(".scales") or ".switch_mlp." in name or not is_mtp(canonical_name(name))
        for name in head
    )

"""A checkpoint opened: every tensor accounted for, nothing of the weights read."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lily_py.checkpoint import layout
from lily_py.checkpoint.chat_template import read_chat_template
from lily_py.checkpoint.config import ModelConfig, end_tokens, parse_config
from lily_py.checkpoint.fields import Fields, read_json
from lily_py.checkpoint.files import list_shards, resolve_folder
from lily_py.checkpoint.generation import read_generation_config
from lily_py.checkpoint.layout import canonical_name, ignored_reason, is_mtp
from lily_py.checkpoint.mtp import check_head, find_sidecar, is_head_part, mtp_quantization, open_sidecar
from lily_py.checkpoint.norms import norm_shift_from_convolutions
from lily_py.checkpoint.quantization import QuantizationTable, parse_quantization
from lily_py.checkpoint.safetensors_header import TensorSlice, read_header
from lily_py.checkpoint.weights import Weight, build_weights
from lily_py.errors import CheckpointError

logger = logging.getLogger("lily.checkpoint")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's description: enough to map its files and build the model, without reading a weight.

    Attributes:
        folder: where it lies.
        files: weight files; `TensorSlice.file` counts in here.
        config: the model's shape.
        weights: canonical name -> weight; names that lily doesn't know are kept for the loader to refuse.
        ignored: reason -> names (in the files) of tensors that aren't needed.
        generation_config: the checkpoint's defaults for sampling.
        chat_template: Jinja source, or None.
        mtp_source: ``"checkpoint"``, the path of a sidecar, or None if there is no MTP head.
        mtp_norm_shift: what `ModelConfig.norm_shift` is for the trunk, for the MTP head.
    """

    folder: Path
    files: tuple[Path, ...]
    config: ModelConfig
    weights: dict[str, Weight]
    ignored: dict[str, list[str]]
    generation_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    mtp_source: str | None = None
    mtp_norm_shift: bool = False

    @property
    def tokenizer_folder(self) -> Path:
        """The folder with ``tokenizer.json``."""
        return self.folder

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in use."""
        return sum(weight.nbytes for weight in self.weights.values())


def open_checkpoint(
    path_or_repo: str | os.PathLike[str],
    *,
    revision: str | None = None,
    mtp: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Checkpoint:
    """Open a checkpoint folder or a Hugging Face repository and account for every tensor in it.

    Args:
        path_or_repo: ``"demo"``, a folder, or ``owner/name`` on Hugging Face (downloaded into its cache).
        revision: branch, tag or commit of a repository.
        mtp: a file, folder or repository with an MTP head, for base checkpoints that come without.
        progress: show download bars; None shows them on a terminal or in a notebook only.

    Raises:
        CheckpointNotFoundError: a folder, repository or promised file that doesn't exist.
        UnsupportedModelError: an architecture or number format that lily doesn't run.
        CheckpointError: damaged, contradictory or incomplete files; names file, tensor or key.
    """
    folder = resolve_folder(path_or_repo, revision=revision, progress=progress)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file; pass the folder that holds config.json and the weights")
    config_path = folder / "config.json"
    raw_config = read_json(config_path)
    where = str(config_path)
    config = parse_config(raw_config, where)
    table = parse_quantization(raw_config, where)

    files, tensors, unindexed = _read_tensors(folder)
    shift = norm_shift_from_convolutions(tensors, config.linear_conv_kernel_dim)
    if shift is None:
        raise CheckpointError(
            f"{folder}: no linear_attn.conv1d tensor in the weights, so this isn't a hybrid model of the "
            "family and it can't be told whether its norms were converted"
        )

    ignored: dict[str, list[str]] = {layout.NOT_INDEXED: unindexed} if unindexed else {}
    used = _select(tensors, config, ignored)
    mtp_table = mtp_quantization(raw_config, where)
    weights = build_weights(used, lambda name: mtp_table if is_mtp(name) else table)
    _require_ends(weights, config, folder)

    head = {name: weights.pop(name) for name in list(weights) if is_mtp(name)}
    mtp_source, mtp_shift, mtp_layers = None, shift, 0
    sidecar_path = mtp if mtp is not None else None if head else find_sidecar(folder)
    if sidecar_path is not None:
        for weight in head.values():
            ignored.setdefault(layout.MTP_REPLACED, []).append(weight.source)
        files, head, mtp_shift, mtp_source = _read_sidecar(
            sidecar_path, mtp is None, config, mtp_table, shift, files, ignored, progress
        )
    elif head:
        mtp_source = "checkpoint"
    if head:
        mtp_layers = check_head(head, config, mtp_source or "checkpoint")
        weights.update(head)
    elif config.mtp_num_hidden_layers:
        logger.warning(
            "%s: the configuration promises an MTP head but the weights have none; "
            "speculation with it is off (pass mtp= to add one)",
            folder,
        )

    generation = read_generation_config(folder, raw_config)
    return Checkpoint(
        folder=folder,
        files=files,
        config=dataclasses.replace(
            config,
            norm_shift=shift,
            mtp_num_hidden_layers=mtp_layers,
            eos_token_ids=tuple(
                dict.fromkeys(
                    (*config.eos_token_ids, *end_tokens(config.vocab_size, Fields(generation, str(folder))))
                )
            ),
        ),
        weights=weights,
        ignored=ignored,
        generation_config=generation,
        chat_template=read_chat_template(folder),
        mtp_source=mtp_source,
        mtp_norm_shift=mtp_shift,
    )


def _read_tensors(folder: Path) -> tuple[tuple[Path, ...], dict[str, TensorSlice], list[str]]:
    """Return (files, source name -> slice, names that the index leaves out)."""
    shards = list_shards(folder)
    tensors: dict[str, TensorSlice] = {}
    unindexed: list[str] = []
    for file, path in enumerate(shards.paths):
        for name, tensor in read_header(path, file).items():
            if shards.index is not None and shards.index.get(name) != file:
                unindexed.append(name)
            elif name in tensors:
                raise CheckpointError(
                    f"{path}: tensor {name!r} is also in {shards.paths[tensors[name].file]}"
                )
            else:
                tensors[name] = tensor
    for name, file in (shards.index or {}).items():
        if name not in tensors:
            raise CheckpointError(
                f"{shards.paths[file]}: tensor {name!r} is promised by the index but isn't there"
            )
    return shards.paths, tensors, unindexed


def _select(
    tensors: Mapping[str, TensorSlice], config: ModelConfig, ignored: dict[str, list[str]]
) -> dict[str, TensorSlice]:
    """Return the tensors in use, and note the others with their reason."""
    used: dict[str, TensorSlice] = {}
    for source, tensor in tensors.items():
        name = canonical_name(source)
        reason = ignored_reason(source)
        if reason is None and config.tie_word_embeddings and name.split(".")[0] == "lm_head":
            reason = layout.TIED_HEAD
        if reason is None and is_mtp(name) and not is_head_part(_whole(name)):
            reason = layout.MTP_SIDECAR_REST
        if reason is None:
            used[source] = tensor
        else:
            ignored.setdefault(reason, []).append(source)
    return used


def _whole(name: str) -> str:
    return name.removesuffix(".scales").removesuffix(".biases")


def _require_ends(weights: Mapping[str, Weight], config: ModelConfig, folder: Path) -> None:
    """Check that embedding and output head are there."""
    if "embed_tokens" not in weights:
        raise CheckpointError(f"{folder}: no embed_tokens in the weights")
    if not config.tie_word_embeddings and "lm_head" not in weights:
        raise CheckpointError(
            f"{folder}: no lm_head in the weights, but config.json has tie_word_embeddings false; "
            "a model that shares the embedding must say tie_word_embeddings true"
        )


def _read_sidecar(
    source: str | os.PathLike[str],
    in_folder: bool,
    config: ModelConfig,
    fallback: QuantizationTable,
    shift: bool,
    files: tuple[Path, ...],
    ignored: dict[str, list[str]],
    progress: bool | None,
) -> tuple[tuple[Path, ...], dict[str, Weight], bool, str]:
    """Return (all files, the head's weights, its norm shift, its source)."""
    sidecar = open_sidecar(
        source,
        config=config,
        fallback=fallback,
        trunk_shift=shift if in_folder else None,
        first_file=len(files),
        progress=progress,
    )
    if sidecar.rest:
        ignored.setdefault(layout.MTP_SIDECAR_REST, []).extend(sidecar.rest)
    head = build_weights(sidecar.tensors, lambda _: sidecar.quantization, sidecar.rename)
    return (*files, *sidecar.files), head, sidecar.norm_shift, sidecar.source

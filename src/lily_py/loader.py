"""From a checkpoint's description to a native model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lily_py import _core
from lily_py.checkpoint import Checkpoint, TensorSlice
from lily_py.errors import CheckpointError


def map_weights(checkpoint: Checkpoint) -> _core.Weights:
    """Map the checkpoint's files and register its tensors under their canonical names; nothing is copied.

    Raises:
        CheckpointError: a file that can't be mapped, a tensor that reaches beyond its file.
    """
    weights = _core.Weights([str(path) for path in checkpoint.files])
    for name, weight in checkpoint.weights.items():
        data = _location(weight.data)
        if weight.quantization is None:
            weights.add(name, weight.source, data)
            continue
        if weight.scales is None:
            raise CheckpointError(f"{weight.source}: quantised without scales")
        weights.add_quantized(
            name,
            weight.source,
            data,
            _location(weight.scales),
            None if weight.biases is None else _location(weight.biases),
            weight.quantization.mode,
            weight.quantization.bits,
            weight.quantization.group_size,
        )
    return weights


def load_model(
    checkpoint: Checkpoint,
    *,
    backend: str = "cpu",
    threads: int = 0,
    kv_dtype: str = "bfloat16",
    ablate: Sequence[str] = (),
    chunk: int | None = None,
    max_context: int | None = None,
    memory_limit: int | None = None,
    whole_context: bool = False,
) -> _core.Model:
    """Build the native model.

    Args:
        threads: 0 for one per core.
        kv_dtype: ``"bfloat16"``, ``"float32"`` or, on the CPU, ``"int8"``.
        ablate: optimisations to switch off.
        chunk: prompt tokens computed together; None for what suits the backend.
        max_context: positions a sequence may hold; None for the checkpoint's own limit.
        memory_limit: bytes on a GPU; None for what its system recommends, which is never exceeded.
        whole_context: refuse to load if a GPU's memory has no room for a conversation of that many.

    Raises:
        CheckpointError: a tensor is missing, misshapen, or unknown to the architecture.
        BackendError: the backend doesn't exist here.
        MemoryBudgetError: the GPU's memory doesn't hold the weights, or that context; says what would fit.
    """
    config = dataclasses.asdict(checkpoint.config)
    config["mtp_norm_shift"] = checkpoint.mtp_norm_shift
    context = checkpoint.config.max_position_embeddings if max_context is None else max_context
    config["max_position_embeddings"] = context
    model = _core.Model(
        config,
        map_weights(checkpoint),
        backend=backend,
        threads=threads,
        kv_dtype=kv_dtype,
        ablate=set(ablate),
        chunk=chunk,
        memory_limit=memory_limit or 0,
        context=context if whole_context else 0,
    )
    if unknown := model.unused_weights:
        shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        raise CheckpointError(
            f"{checkpoint.folder}: the architecture has no place for {shown}; "
            "the checkpoint belongs to a model that lily doesn't know"
        )
    return model


def _location(tensor: TensorSlice) -> tuple[int, int, int, str, list[int]]:
    return (tensor.file, tensor.offset, tensor.nbytes, tensor.dtype, list(tensor.shape))

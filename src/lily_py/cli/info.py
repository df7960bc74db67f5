"""``lily info``: a checkpoint described for people, or as JSON."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from lily_py.checkpoint import Checkpoint, open_checkpoint
from lily_py.checkpoint.files import DOWNLOAD_PATTERNS, existing_path
from lily_py.cli.description import (
    active_parameters,
    kv_bytes_per_token,
    memory_per_context,
    recurrent_bytes,
    tensor_groups,
)
from lily_py.errors import CheckpointNotFoundError
from lily_py.memory import format_size
from lily_py.sampling import checkpoint_defaults

_SHOWN_IGNORED = 3
"""Names of ignored tensors to show for each reason; the JSON has all."""


def run(options: argparse.Namespace) -> int:
    """Print the description and return the exit status."""
    if not options.download:
        _require_local(options.model, options.revision)
    checkpoint = open_checkpoint(options.model, revision=options.revision, mtp=options.mtp)
    if options.json:
        print(json.dumps(describe(checkpoint), ensure_ascii=False, indent=1))
    else:
        print("\n".join(_report(checkpoint)))
    return 0


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return everything as one JSON object; sizes are in bytes."""
    config = checkpoint.config
    groups = tensor_groups(checkpoint.weights.values())
    return {
        "folder": str(checkpoint.folder),
        "config": {
            name: list(value) if isinstance(value, tuple) else value for name, value in vars(config).items()
        },
        "parameters": sum(group.parameters for group in groups if group.kind != "MTP head"),
        "active_parameters": active_parameters(checkpoint),
        "weights": {
            "bytes": checkpoint.nbytes,
            "kinds": [
                {
                    "kind": group.kind,
                    "format": group.format,
                    "tensors": group.weights,
                    "parameters": group.parameters,
                    "bits": round(group.bits, 3),
                    "bytes": group.nbytes,
                }
                for group in groups
            ],
        },
        "kv_bytes_per_token": kv_bytes_per_token(config),
        "recurrent_bytes": recurrent_bytes(config),
        "memory_per_context": memory_per_context(checkpoint),
        "mtp_source": checkpoint.mtp_source,
        "chat_template": checkpoint.chat_template is not None,
        "sampling": checkpoint.generation_config,
        "ignored": checkpoint.ignored,
    }


def _report(checkpoint: Checkpoint) -> Iterable[str]:
    """Yield the lines for people."""
    yield str(checkpoint.folder)
    yield ""
    yield from _table(_architecture(checkpoint))
    yield ""
    yield from _weights_table(checkpoint)
    yield ""
    yield "memory for weights and one conversation"
    lengths = memory_per_context(checkpoint).items()
    yield from _table([(f"{tokens:,} tokens", format_size(nbytes)) for tokens, nbytes in lengths], right=True)
    if checkpoint.ignored:
        yield ""
        yield "tensors that aren't used"
        for reason, names in checkpoint.ignored.items():
            shown = ", ".join(names[:_SHOWN_IGNORED]) + (", ..." if len(names) > _SHOWN_IGNORED else "")
            yield f"  {reason}: {len(names)} ({shown})"


def _architecture(checkpoint: Checkpoint) -> Iterable[tuple[str, str]]:
    config = checkpoint.config
    attention = config.layer_types.count("full_attention")
    groups = tensor_groups(checkpoint.weights.values())
    trunk = sum(group.parameters for group in groups if group.kind != "MTP head")
    yield "architecture", config.model_type
    yield "parameters", f"{_count(trunk)}, {_count(active_parameters(checkpoint))} of them active in a token"
    yield (
        "layers",
        f"{config.num_hidden_layers}: {config.num_hidden_layers - attention} gated delta net, "
        f"{attention} attention",
    )
    yield "hidden size", f"{config.hidden_size:,}"
    yield (
        "attention",
        f"{config.num_attention_heads} query heads, {config.num_key_value_heads} key/value heads of "
        f"{config.head_dim}, rotary on {config.rotary_dim} (base {config.rope_theta:,.0f})",
    )
    yield (
        "gated delta net",
        f"{config.linear_num_key_heads} key heads of {config.linear_key_head_dim}, "
        f"{config.linear_num_value_heads} value heads of {config.linear_value_head_dim}, "
        f"convolution over {config.linear_conv_kernel_dim}",
    )
    if config.num_experts:
        shared = config.shared_expert_intermediate_size
        yield (
            "experts",
            f"{config.num_experts} of {config.moe_intermediate_size}, {config.num_experts_per_tok} a token, "
            + (f"one shared of {shared}" if shared else "none shared"),
        )
    if config.intermediate_size:
        dense = len(config.mlp_only_layers)
        where = f" in {dense} layers" if config.num_experts else ""
        yield "feed-forward", f"dense, {config.intermediate_size:,}{where}"
    tied = ", the embedding is the output head" if config.tie_word_embeddings else ""
    yield "vocabulary", f"{config.vocab_size:,}{tied}"
    yield "context", f"{config.max_position_embeddings:,} tokens"
    yield "KV cache", f"{format_size(kv_bytes_per_token(config))} a token"
    yield "recurrent state", f"{format_size(recurrent_bytes(config))} a conversation"
    layers = config.mtp_num_hidden_layers
    source = "the checkpoint" if checkpoint.mtp_source == "checkpoint" else checkpoint.mtp_source
    yield "MTP head", f"{layers} layer{'s' if layers > 1 else ''}, from {source}" if source else "none"
    yield "chat template", "yes" if checkpoint.chat_template is not None else "none: prompts are continued"
    yield "sampling", checkpoint_defaults(checkpoint.generation_config).differences()


def _weights_table(checkpoint: Checkpoint) -> Iterable[str]:
    groups = tensor_groups(checkpoint.weights.values())
    rows = [
        (
            group.kind,
            group.format,
            f"{group.weights:,}",
            _count(group.parameters),
            f"{group.bits:.2f}",
            format_size(group.nbytes),
        )
        for group in groups
    ]
    parameters = sum(group.parameters for group in groups)
    bits = 8 * checkpoint.nbytes / parameters if parameters else 0.0
    total = ("all", "", f"{sum(group.weights for group in groups):,}", _count(parameters), f"{bits:.2f}")
    rows.append((*total, format_size(checkpoint.nbytes)))
    header = ("weights", "format", "tensors", "parameters", "bits", "size")
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        left = (cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True))
        right = (cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))
        yield "  ".join((*left, *right))


def _table(rows: Iterable[Sequence[str]], *, right: bool = False) -> Iterable[str]:
    """Yield lines of two columns; `right` aligns both to the right."""
    cells = list(rows)
    first, second = (max(len(row[i]) for row in cells) for i in range(2))
    for name, value in cells:
        yield f"  {name:>{first}}  {value:>{second}}" if right else f"{name:<{first}}  {value}"


def _count(number: int) -> str:
    """Return a number of parameters as people write it: 35.1 B."""
    for unit, name in ((10**9, " B"), (10**6, " M"), (10**3, " K")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)


def _require_local(model: str | os.PathLike[str], revision: str | None) -> None:
    """Check that a repository has been downloaded: nobody wants 20 GB for a look at a description."""
    name = os.fspath(model)
    if name == "demo" or existing_path(name) is not None or name.count("/") != 1:
        return
    import huggingface_hub
    from huggingface_hub import errors

    try:
        huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(DOWNLOAD_PATTERNS), local_files_only=True
        )
    except errors.HFValidationError:
        return
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{name}: no such folder, and not downloaded from Hugging Face yet; "
            f"`lily info --download {name}` fetches the whole repository"
        ) from error

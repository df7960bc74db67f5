"""Whether stored RMSNorm weights are zero-centred, told from the layout of the convolutions.

Original checkpoints store w for a norm that multiplies by 1 + w, and convolutions as [C, 1, K]. Converters
to MLX turn both at once: 1 + w, and [C, K, 1]. The convolution is unmistakable; the values of the norms are
not, so they are never looked at.
"""

from __future__ import annotations

from collections.abc import Mapping

from lily_py.checkpoint.layout import canonical_name
from lily_py.checkpoint.safetensors_header import TensorSlice
from lily_py.errors import CheckpointError

_CONVOLUTION = ".linear_attn.conv1d"


def is_convolution(source: str) -> bool:
    """Tell whether a tensor is the convolution of a GDN layer."""
    return canonical_name(source).endswith(_CONVOLUTION)


def norm_shift_from_convolutions(tensors: Mapping[str, TensorSlice], kernel: int) -> bool | None:
    """Return true if norms need +1, false if a converter added it, None if there is no convolution to tell.

    Args:
        tensors: source name -> slice, of one checkpoint.
        kernel: width K of the convolutions (`linear_conv_kernel_dim`).

    Raises:
        CheckpointError: a convolution has neither layout, or two of them disagree.
    """
    decision: bool | None = None
    decided_by = ""
    for source, tensor in tensors.items():
        if not is_convolution(source):
            continue
        if len(tensor.shape) == 3 and tensor.shape[1:] == (1, kernel):
            raw = True
        elif len(tensor.shape) == 3 and tensor.shape[1:] == (kernel, 1):
            raw = False
        else:
            raise CheckpointError(
                f"{source}: shape {list(tensor.shape)} is neither [channels, 1, {kernel}] "
                f"nor [channels, {kernel}, 1]"
            )
        if decision is not None and raw != decision:
            raise CheckpointError(
                f"{source} and {decided_by} have different layouts; only a half-converted checkpoint has both"
            )
        decision, decided_by = raw, source
    return decision

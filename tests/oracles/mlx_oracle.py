"""mlx-lm as an oracle: the checkpoint as mlx-lm loads it, computed in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import _get_classes, load_model
from numpy.typing import NDArray

from oracles.result import FloatArray, Result


def _numpy(array: mx.array) -> FloatArray:
    return np.array(array.astype(mx.float32))


def _float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


def _float32_classes(config: dict[str, Any]) -> tuple[type, type]:
    """mlx-lm's classes, casting before `sanitize`, which adds 1 to raw norms and would round in bf16."""
    model, args = _get_classes(config)

    class Float32Model(model):  # type: ignore[misc, valid-type]
        def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
            return dict(super().sanitize({name: _float32(w) for name, w in weights.items()}))

    return Float32Model, args


class MlxOracle:
    """mlx-lm's model of a checkpoint folder, all floating-point tensors cast to float32.

    The cast is exact, and needed: mlx has no bf16 product for unquantised experts on a CPU.
    """

    def __init__(self, path: Path | str) -> None:
        mx.set_default_device(mx.cpu)
        self.model, self.config = load_model(Path(path), get_model_classes=_float32_classes)

    def forward(self, ids: Sequence[int] | NDArray[np.integer[Any]], *, chunk: int | None = None) -> Result:
        """Runs the tokens from an empty state, in pieces of `chunk` if given."""
        tokens = mx.array(np.asarray(ids, np.int32))[None]
        cache = make_prompt_cache(self.model)
        size = chunk or tokens.shape[1]
        hiddens = []
        for start in range(0, tokens.shape[1], size):
            hiddens.append(self.model.model(tokens[:, start : start + size], cache))
            mx.eval(hiddens[-1], [layer.state for layer in cache])
        hidden = mx.concatenate(hiddens, axis=1)
        text = getattr(self.model, "language_model", self.model)
        head = getattr(text, "lm_head", None) or text.model.embed_tokens.as_linear
        result = Result(logits=_numpy(head(hidden))[0], hidden=_numpy(hidden)[0])
        for i, layer in enumerate(cache):
            if isinstance(layer, KVCache):
                for kind, padded in ((result.keys, layer.keys), (result.values, layer.values)):
                    kind[i] = _numpy(padded[0, :, : layer.offset].transpose(1, 0, 2))
            else:
                conv, state = layer[0], layer[1]
                # mlx-lm keeps [K-1, C] and [Hv, Dv, Dk]
                result.conv[i] = _numpy(conv)[0].T
                result.recurrent[i] = _numpy(state)[0].transpose(0, 2, 1)
        return result

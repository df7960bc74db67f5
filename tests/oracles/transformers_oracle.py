"""transformers on the CPU as an oracle, in float32; needs PyTorch: import it under the `oracle` marker only.

Raw checkpoints are loaded by transformers itself. Converted and quantised ones, which it cannot read, get
their weights from `Reference`, dequantised and renamed in memory: there it judges the arithmetic alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from oracles.checkpoints import is_zero_centred
from oracles.reference import Reference
from oracles.result import FloatArray, Result

Ids = Sequence[int] | NDArray[np.integer[Any]]

# model_type of config.json -> stem of the class names
_CLASSES = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "qwen3_next": "Qwen3Next"}


def _dequantised(reference: Reference, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that transformers calls `name`, in the raw layout."""
    plain = name.removeprefix("model.")
    module = plain.removesuffix(".weight")
    if plain == "lm_head.weight" and reference.config["tie_word_embeddings"]:
        values = reference.matrix("embed_tokens", shape[-1])
    elif plain.endswith("experts.gate_up_proj"):
        gate, up, _ = reference.expert_weights(plain.removesuffix(".experts.gate_up_proj"))
        values = np.concatenate([gate, up], axis=1)
    elif plain.endswith("experts.down_proj"):
        values = reference.expert_weights(plain.removesuffix(".experts.down_proj"))[2]
    elif plain.endswith("conv1d.weight") or len(shape) == 1:
        values = reference.vector(plain).reshape(shape) - (1 if is_zero_centred(plain) else 0)
    else:
        values = reference.matrix(module, shape[-1])
    return torch.from_numpy(values.astype(np.float32).reshape(shape))


class TransformersOracle:
    """transformers' causal language model of a checkpoint folder."""

    def __init__(self, path: Path | str) -> None:
        folder = Path(path)
        config = json.loads((folder / "config.json").read_text())
        stem = _CLASSES[config["model_type"]]
        reference = Reference(folder)
        self.kernel = reference.kernel
        model_class = getattr(transformers, f"{stem}ForCausalLM")
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        if reference.is_raw:
            self.model, info = model_class.from_pretrained(folder, output_loading_info=True, **options)
            assert not info["missing_keys"], info["missing_keys"]
            assert not info["mismatched_keys"], info["mismatched_keys"]
        else:
            config_class = getattr(transformers, f"{stem}{'' if stem == 'Qwen3Next' else 'Text'}Config")
            self.model = model_class._from_config(
                config_class(**config.get("text_config", config)), **options
            )
            wanted = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
            self.model.load_state_dict({n: _dequantised(reference, n, s) for n, s in wanted.items()})
        self.model.eval()

    @torch.no_grad()
    def forward(self, ids: Ids, *, prefill: int | None = None) -> Result:
        """Runs the tokens from an empty state; those after the first `prefill` go one by one."""
        tokens = torch.from_numpy(np.asarray(ids, np.int64))[None]
        first = prefill or tokens.shape[1]
        output = self.model.model(input_ids=tokens[:, :first], use_cache=True)
        hidden = [output.last_hidden_state]
        for i in range(first, tokens.shape[1]):
            output = self.model.model(input_ids=tokens[:, i : i + 1], cache=output.cache, use_cache=True)
            hidden.append(output.last_hidden_state)
        joined = torch.cat(hidden, dim=1)
        result = Result(logits=self.model.lm_head(joined)[0].numpy(), hidden=joined[0].numpy())
        for i, kind in enumerate(self.model.config.layer_types):
            layer = output.cache.layers[i]
            if kind == "full_attention":
                result.keys[i] = layer.keys[0].transpose(0, 1).numpy()
                result.values[i] = layer.values[0].transpose(0, 1).numpy()
            else:
                result.conv[i] = layer.conv_states[0][0, :, 1 - self.kernel :].numpy()
                result.recurrent[i] = layer.recurrent_states[0][0].numpy()
        return result

    @torch.no_grad()
    def mtp(self, hidden: FloatArray, ids: Ids) -> Result:
        """The MTP head of a raw checkpoint over a text, as `Reference.mtp`.

        transformers loads the head of this family once the config says that there is one.
        """
        self.model._keys_to_ignore_on_load_unexpected = [r"^mtp.*"]
        self.model.config.num_mtp_layers, self.model.config.mtp_layer_types = 1, ["full_attention"]
        head = MtpModel.from_pretrained(self.model).eval().float()
        rows = torch.from_numpy(np.asarray(hidden, np.float32)[None, :-1])
        tokens = torch.from_numpy(np.asarray(ids, np.int64))[None, 1:]
        cache = MtpCache(config=head.config)
        z = head.forward_layer(0, rows, torch.arange(rows.shape[1])[None], cache, input_ids=tokens)[0]
        z = z.reshape(-1, z.shape[-1])
        return Result(logits=self.model.lm_head(z).numpy(), hidden=z.numpy())

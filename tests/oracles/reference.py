"""The Qwen3.5/3.6 and Qwen3-Next text model in plain NumPy, written from its formulas.

It reads the same folders as the engine, with its own parser and dequantisers, and computes in float64 unless
told otherwise. Shapes in docstrings: T tokens, hidden size H, and for the gated delta net Hk key heads and Hv
value heads of sizes Dk and Dv.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracles import tensorfile
from oracles.dequantise import dequantise
from oracles.result import FloatArray, Result

_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")
_VISION = ("model.visual.", "vision_tower.")

Ids = Sequence[int] | NDArray[np.integer[Any]]


def sigmoid(x: FloatArray) -> FloatArray:
    return np.asarray(np.exp(-np.logaddexp(0, -x)))


def silu(x: FloatArray) -> FloatArray:
    return np.asarray(x * sigmoid(x))


def softmax(x: FloatArray) -> FloatArray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def rms_norm(x: FloatArray, weight: FloatArray, eps: float) -> FloatArray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def l2_norm(x: FloatArray, eps: float = 1e-6) -> FloatArray:
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + eps)


def rotate(x: FloatArray, positions: NDArray[np.integer[Any]], dims: int, theta: float) -> FloatArray:
    """Rotary embedding of the first `dims` of x [T, heads, D]; dimension i pairs with i + dims / 2."""
    frequency = theta ** -(np.arange(0, dims, 2) / dims)
    angle = (positions[:, None] * frequency)[:, None, :]
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    first, second, rest = np.split(x, [dims // 2, dims], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def causal_convolution(
    x: FloatArray, kernel: FloatArray, before: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Depthwise convolution of x [T, C] with kernel [C, K] after the inputs `before` [C, K-1].

    Returns the outputs [T, C] and the last K-1 inputs [C, K-1], oldest first.
    """
    inputs = np.concatenate([before.T, x])
    steps = len(x)
    taps = kernel.shape[1]
    y = sum(inputs[j : j + steps] * kernel[:, j] for j in range(taps))
    return np.asarray(y), inputs[steps:].T


def delta_rule(
    q: FloatArray, k: FloatArray, v: FloatArray, decay: FloatArray, beta: FloatArray, state: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The gated delta rule, token by token: q, k [T, Hv, Dk], v [T, Hv, Dv], decay and beta [T, Hv].

    S <- decay S;  S <- S + k (beta (v - S^T k))^T;  y = S^T q, with S [Hv, Dk, Dv].
    Returns y [T, Hv, Dv] and the last S.
    """
    outputs = np.empty_like(v)
    for t in range(len(q)):
        state = state * decay[t, :, None, None]
        recalled = (k[t, :, None, :] @ state)[:, 0]
        correction = beta[t, :, None] * (v[t] - recalled)
        state = state + k[t, :, :, None] * correction[:, None, :]
        outputs[t] = (q[t, :, None, :] @ state)[:, 0]
    return outputs, state


class Reference:
    """One model read from a checkpoint folder in any layout `oracles.checkpoints` writes.

    Args:
        path: the folder.
        dtype: np.float64 or np.float32, of every weight and activation.
        mtp: a safetensors file with the MTP head when it is not among the folder's own files.
    """

    def __init__(self, path: Path | str, *, dtype: type = np.float64, mtp: Path | str | None = None) -> None:
        folder = Path(path)
        config = json.loads((folder / "config.json").read_text())
        self.config: dict[str, Any] = config.get("text_config", config)
        self.dtype = dtype
        tensors = tensorfile.read_folder(folder) | (tensorfile.read(Path(mtp)) if mtp else {})
        self._tensors = {self._plain_name(n): t for n, t in tensors.items() if not n.startswith(_VISION)}
        self._cache: dict[str, FloatArray] = {}
        # Raw checkpoints hold conv1d as [C, 1, K] and norms as w - 1; converters change both together.
        self.is_raw = any(n.endswith("conv1d.weight") and t.shape[-1] != 1 for n, t in self._tensors.items())

        c = self.config
        rope = c.get("rope_parameters") or c
        self.hidden: int = c["hidden_size"]
        self.layers: int = c["num_hidden_layers"]
        self.vocab: int = c["vocab_size"]
        self.eps: float = c["rms_norm_eps"]
        self.heads: int = c["num_attention_heads"]
        self.kv_heads: int = c["num_key_value_heads"]
        self.head_dim: int = c["head_dim"]
        self.theta: float = rope["rope_theta"]
        self.rotary_dims = int(self.head_dim * rope["partial_rotary_factor"])
        self.key_heads: int = c["linear_num_key_heads"]
        self.value_heads: int = c["linear_num_value_heads"]
        self.key_dim: int = c["linear_key_head_dim"]
        self.value_dim: int = c["linear_value_head_dim"]
        self.kernel: int = c["linear_conv_kernel_dim"]
        self.top_k: int = c.get("num_experts_per_tok", 0)

    @staticmethod
    def _plain_name(name: str) -> str:
        return next((name.removeprefix(p) for p in _PREFIXES if name.startswith(p)), name)

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % int(self.config["full_attention_interval"]) == 0

    # Weights

    def matrix(self, name: str, width: int) -> FloatArray:
        """A projection or an embedding [..., width], dequantised if it is packed; `name` has no `.weight`."""
        if name not in self._cache:
            scales = self._tensors.get(f"{name}.scales")
            if scales is None:
                values = self._tensors[f"{name}.weight" if f"{name}.weight" in self._tensors else name]
            else:
                biases = self._tensors.get(f"{name}.biases")
                values = dequantise(self._tensors[f"{name}.weight"], scales, biases, width)
            assert values.shape[-1] == width, f"{name} is {values.shape}, expected [..., {width}]"
            self._cache[name] = values.astype(self.dtype)
        return self._cache[name]

    def vector(self, name: str) -> FloatArray:
        return np.asarray(self._tensors[name], self.dtype)

    def norm(self, x: FloatArray, name: str) -> FloatArray:
        """RMS norm by a weight that raw checkpoints store zero-centred."""
        return rms_norm(x, self.vector(f"{name}.weight") + (1 if self.is_raw else 0), self.eps)

    def linear(self, x: FloatArray, name: str) -> FloatArray:
        return x @ self.matrix(name, x.shape[-1]).T

    def head(self, hidden: FloatArray) -> FloatArray:
        """Logits [T, vocab] from hidden states after the final norm."""
        return self.linear(hidden, "embed_tokens" if self.config["tie_word_embeddings"] else "lm_head")

    # Blocks

    def attention(
        self, x: FloatArray, name: str, past: tuple[FloatArray, FloatArray] | None
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Gated attention of x [T, H] after `past` keys and values; returns output, all keys, all values."""
        steps, d = len(x), self.head_dim
        # each head's rows of q_proj are its query, then its gate
        q, gate = np.split(self.linear(x, f"{name}.q_proj").reshape(steps, self.heads, 2 * d), 2, axis=-1)
        k = self.linear(x, f"{name}.k_proj").reshape(steps, self.kv_heads, d)
        v = self.linear(x, f"{name}.v_proj").reshape(steps, self.kv_heads, d)
        start = len(past[0]) if past else 0
        positions = np.arange(start, start + steps)
        q = rotate(self.norm(q, f"{name}.q_norm"), positions, self.rotary_dims, self.theta)
        k = rotate(self.norm(k, f"{name}.k_norm"), positions, self.rotary_dims, self.theta)
        if past:
            k, v = np.concatenate([past[0], k]), np.concatenate([past[1], v])

        shared = self.heads // self.kv_heads
        keys, values = (np.repeat(a.transpose(1, 0, 2), shared, axis=0) for a in (k, v))
        scores = q.transpose(1, 0, 2) @ keys.transpose(0, 2, 1) * d**-0.5
        scores = np.where(np.arange(len(k)) > positions[:, None], -np.inf, scores)
        mixed = (softmax(scores) @ values).transpose(1, 0, 2) * sigmoid(gate)
        return self.linear(mixed.reshape(steps, -1), f"{name}.o_proj"), k, v

    def gdn_inputs(self, x: FloatArray, name: str) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """The projections qkv [T, 2 Hk Dk + Hv Dv], z [T, Hv Dv], b and a [T, Hv] of either layout."""
        if f"{name}.in_proj_qkv.weight" in self._tensors:
            qkv, z, b, a = (self.linear(x, f"{name}.in_proj_{part}") for part in ("qkv", "z", "b", "a"))
            return qkv, z, b, a
        steps, per_key = len(x), self.value_heads // self.key_heads
        d, w = self.key_dim, per_key * self.value_dim
        # Qwen3-Next groups the rows by key head: q, k, then that head's values, then their gates
        mixed = self.linear(x, f"{name}.in_proj_qkvz").reshape(steps, self.key_heads, 2 * d + 2 * w)
        q, k, v, z = (p.reshape(steps, -1) for p in np.split(mixed, [d, 2 * d, 2 * d + w], axis=-1))
        mixed = self.linear(x, f"{name}.in_proj_ba").reshape(steps, self.key_heads, 2 * per_key)
        b, a = (p.reshape(steps, -1) for p in np.split(mixed, 2, axis=-1))
        return np.concatenate([q, k, v], -1), z, b, a

    def gated_delta_net(
        self, x: FloatArray, name: str, conv: FloatArray, state: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Output [T, H] of x [T, H], the convolution's [C, K-1] and the recurrent state [Hv, Dk, Dv]."""
        steps, keys = len(x), self.key_heads * self.key_dim
        qkv, z, b, a = self.gdn_inputs(x, name)
        kernel = self.vector(f"{name}.conv1d.weight").reshape(-1, self.kernel)
        qkv, conv = causal_convolution(qkv, kernel, conv)
        q, k, v = np.split(silu(qkv), [keys, 2 * keys], axis=-1)
        # value head h reads key head h // (Hv / Hk)
        per_key = self.value_heads // self.key_heads
        q, k = (l2_norm(p.reshape(steps, self.key_heads, self.key_dim)) for p in (q, k))
        q, k = (np.repeat(p, per_key, axis=1) for p in (q, k))
        v = v.reshape(steps, self.value_heads, self.value_dim)
        rate = np.exp(self.vector(f"{name}.A_log")) * np.logaddexp(0, a + self.vector(f"{name}.dt_bias"))
        y, state = delta_rule(q * self.key_dim**-0.5, k, v, np.exp(-rate), sigmoid(b), state)
        y = rms_norm(y, self.vector(f"{name}.norm.weight"), self.eps) * silu(z.reshape(y.shape))
        return self.linear(y.reshape(steps, -1), f"{name}.out_proj"), conv, state

    def mlp(self, x: FloatArray, name: str) -> FloatArray:
        gated = silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj")
        return self.linear(gated, f"{name}.down_proj")

    def expert_weights(self, name: str) -> tuple[FloatArray, FloatArray, FloatArray]:
        """gate and up [E, I, H] and down [E, H, I], from fused, stacked or separate tensors."""
        h, width = self.hidden, int(self.config["moe_intermediate_size"])
        if f"{name}.experts.gate_up_proj" in self._tensors:
            gate, up = np.split(self.matrix(f"{name}.experts.gate_up_proj", h), 2, axis=1)
            return gate, up, self.matrix(f"{name}.experts.down_proj", width)
        parts = (("gate_proj", h), ("up_proj", h), ("down_proj", width))
        if f"{name}.switch_mlp.gate_proj.weight" in self._tensors:
            gate, up, down = (self.matrix(f"{name}.switch_mlp.{part}", w) for part, w in parts)
            return gate, up, down
        every = range(int(self.config["num_experts"]))
        gate, up, down = (
            np.stack([self.matrix(f"{name}.experts.{e}.{part}", w) for e in every]) for part, w in parts
        )
        return gate, up, down

    def mixture(self, x: FloatArray, name: str) -> tuple[FloatArray, NDArray[np.int64]]:
        """Output [T, H] of the chosen and the shared experts, and the choice [T, top_k]."""
        probabilities = softmax(self.linear(x, f"{name}.gate"))
        chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, : self.top_k]
        share = np.take_along_axis(probabilities, chosen, -1)
        if self.config.get("norm_topk_prob", True):
            share = share / share.sum(-1, keepdims=True)
        gate, up, down = self.expert_weights(name)
        y = np.zeros_like(x)
        for e in np.unique(chosen):
            rows, slots = np.nonzero(chosen == e)
            gated = silu(x[rows] @ gate[e].T) * (x[rows] @ up[e].T)
            y[rows] += share[rows, slots, None] * (gated @ down[e].T)
        shared = self.mlp(x, f"{name}.shared_expert")
        return y + sigmoid(self.linear(x, f"{name}.shared_expert_gate")) * shared, chosen

    def feed_forward(self, x: FloatArray, name: str) -> tuple[FloatArray, NDArray[np.int64] | None]:
        if any(f"{name}.gate.{part}" in self._tensors for part in ("weight", "scales")):
            return self.mixture(x, name)
        return self.mlp(x, name), None

    # The model

    def forward(self, ids: Ids, *, after: Result | None = None, return_states: bool = True) -> Result:
        """Runs T tokens, from nothing or from the state `after` an earlier call.

        `keys` and `values` of the result cover all positions so far, everything else the T tokens given.
        """
        x = self.matrix("embed_tokens", self.hidden)[np.asarray(ids, np.int64)]
        result = Result(logits=x, hidden=x)
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        for i in range(self.layers):
            y = self.norm(x, f"layers.{i}.input_layernorm")
            if self.is_attention(i):
                past = (after.keys[i], after.values[i]) if after else None
                y, result.keys[i], result.values[i] = self.attention(y, f"layers.{i}.self_attn", past)
            else:
                conv = after.conv[i] if after else np.zeros((channels, self.kernel - 1), self.dtype)
                empty = (self.value_heads, self.key_dim, self.value_dim)
                state = after.recurrent[i] if after else np.zeros(empty, self.dtype)
                y, result.conv[i], result.recurrent[i] = self.gated_delta_net(
                    y, f"layers.{i}.linear_attn", conv, state
                )
            x = x + y
            y = self.norm(x, f"layers.{i}.post_attention_layernorm")
            y, chosen = self.feed_forward(y, f"layers.{i}.mlp")
            if chosen is not None:
                result.experts[i] = chosen
            x = x + y
        result.hidden = self.norm(x, "norm")
        result.logits = self.head(result.hidden)
        return result if return_states else Result(result.logits, result.hidden)

    def mtp(self, hidden: FloatArray, ids: Ids) -> Result:
        """The MTP head over a text: row p reads `hidden[p]` and token `ids[p + 1]`, and predicts token p + 2.

        `hidden` is the trunk's [T, H] for `ids` [T]; the T - 1 rows returned are those a prefill can fill.
        """
        return MtpHead(self).step(np.asarray(ids)[1:], hidden[: len(ids) - 1])


class MtpHead:
    """The MTP head with its own keys and values, for drafting several tokens in a row."""

    def __init__(self, model: Reference) -> None:
        self.model = model
        empty: FloatArray = np.zeros((0, model.kv_heads, model.head_dim), model.dtype)
        self.keys, self.values = empty, empty

    def step(self, tokens: Ids, hidden: FloatArray) -> Result:
        """Appends rows: `tokens` [N] follow the positions whose hidden states [N, H] are given.

        The result's `hidden` is what the next draft reads in place of the trunk's; keys and values are under
        layer 0 and cover all rows so far.
        """
        m = self.model
        embedded = m.matrix("embed_tokens", m.hidden)[np.asarray(tokens, np.int64)]
        # the embedding's half comes first
        joined = np.concatenate(
            [m.norm(embedded, "mtp.pre_fc_norm_embedding"), m.norm(hidden, "mtp.pre_fc_norm_hidden")], -1
        )
        x = m.linear(joined, "mtp.fc")
        y = m.norm(x, "mtp.layers.0.input_layernorm")
        y, self.keys, self.values = m.attention(y, "mtp.layers.0.self_attn", (self.keys, self.values))
        x = x + y
        y, chosen = m.feed_forward(m.norm(x, "mtp.layers.0.post_attention_layernorm"), "mtp.layers.0.mlp")
        z = m.norm(x + y, "mtp.norm")
        experts = {} if chosen is None else {0: chosen}
        return Result(m.head(z), z, keys={0: self.keys}, values={0: self.values}, experts=experts)

    def trim(self, rows: int) -> None:
        """Forgets the last `rows` rows."""
        kept = len(self.keys) - rows
        self.keys, self.values = self.keys[:kept], self.values[:kept]

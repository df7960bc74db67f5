"""Sizes of a loaded model, for people who plan their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lily_py.memory import format_size


@dataclass(frozen=True)
class EngineInfo:
    """What an engine has loaded and what it needs; bytes unless said otherwise.

    Attributes:
        checkpoint: folder.
        model_type: architecture.
        layers: of them, `attention_layers` keep keys and values for every token.
        experts: per mixture layer, `experts_per_token` of them used; 0 for a dense model.
        vocabulary: tokens that can be generated.
        backend: what computes, and with how many threads.
        context: most tokens of a conversation here.
        weights: mapped from the files.
        kv_per_token: keys and values of one token.
        recurrent_state: of a conversation, whatever its length; also the size of one snapshot.
        cache_budget: for stored states.
        cache_used: by stored states, without what sessions hold.
        in_use: weights, sessions and stored states.
        memory_limit: None for no limit.
        mtp: where the multi-token prediction head comes from, or None.
        defaults: sampling, as given by the checkpoint.
        draws: tokens drawn after the first of an answer, by where: ``"backend"``, or why the host had to, as
            ``"host: log probabilities"``.
        gpu_memory: what a GPU holds whatever is computed, by name, and the limit of all that it may hold;
            empty for the CPU.
    """

    checkpoint: str
    model_type: str
    layers: int
    attention_layers: int
    experts: int
    experts_per_token: int
    vocabulary: int
    backend: str
    context: int
    weights: int
    kv_per_token: int
    recurrent_state: int
    cache_budget: int
    cache_used: int
    in_use: int
    memory_limit: int | None
    mtp: str | None
    defaults: str
    draws: Mapping[str, int]
    gpu_memory: Mapping[str, int] = field(default_factory=dict)

    def memory_for(self, tokens: int) -> int:
        """Return the bytes needed for the weights, a GPU's buffers and one conversation of so many tokens."""
        held = sum(nbytes for name, nbytes in self.gpu_memory.items() if name != "limit")
        return (held or self.weights) + tokens * self.kv_per_token + self.recurrent_state

    @property
    def memory_per_context(self) -> dict[int, int]:
        """Context length -> bytes as in `memory_for`, doubling from 4,096 up to the engine's context."""
        lengths = []
        length = 4096
        while length < self.context:
            lengths.append(length)
            length *= 2
        return {tokens: self.memory_for(tokens) for tokens in (*lengths, self.context)}

    def __str__(self) -> str:
        rows = [
            ("checkpoint", f"{self.checkpoint} ({self.model_type})"),
            ("layers", f"{self.layers}, {self.attention_layers} with attention"),
            (
                "experts",
                f"{self.experts}, {self.experts_per_token} a token" if self.experts else "none, dense",
            ),
            ("backend", self.backend),
            ("weights", format_size(self.weights)),
            ("KV per token", format_size(self.kv_per_token)),
            ("recurrent state", format_size(self.recurrent_state)),
            ("stored states", f"{format_size(self.cache_used)} of {format_size(self.cache_budget)}"),
            *((f"GPU {name}", format_size(nbytes)) for name, nbytes in self.gpu_memory.items()),
            ("sampling", self.defaults or "greedy"),
            ("MTP head", self.mtp or "none"),
            ("tokens drawn", ", ".join(f"{n:,} {where}" for where, n in self.draws.items()) or "none yet"),
            *(
                (f"memory at {tokens:,}", format_size(nbytes))
                for tokens, nbytes in self.memory_per_context.items()
            ),
        ]
        return "\n".join(f"{name:<17} {value}" for name, value in rows)

"""The demo model's network: `Qwen3_5MoeForCausalLM` of transformers, an MTP head, their losses."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm

HEAD_DIM, GDN_HEAD_DIM = 64, 32


def text_config(
    vocab: int, hidden: int, layers: int, experts: int, active: int, inner: int
) -> Qwen3_5MoeTextConfig:
    """Return the family's text configuration at demo size; input widths are multiples of the group size."""
    config = Qwen3_5MoeTextConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        linear_key_head_dim=GDN_HEAD_DIM,
        linear_value_head_dim=GDN_HEAD_DIM,
        linear_num_key_heads=hidden // 64,
        linear_num_value_heads=hidden // 32,
        num_experts=experts,
        num_experts_per_tok=active,
        moe_intermediate_size=inner,
        shared_expert_intermediate_size=inner,
        tie_word_embeddings=False,
        output_router_logits=False,
    )
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    return config


class MtpHead(nn.Module):
    """Predicts token p+2 from the trunk's hidden state at p (after the norm) and token p+1's embedding."""

    def __init__(self, config: Qwen3_5MoeTextConfig) -> None:
        super().__init__()
        one_layer = copy.deepcopy(config)
        one_layer.layer_types, one_layer.num_hidden_layers = ["full_attention"], 1
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5MoeRMSNorm(width, eps=eps)
        self.pre_fc_norm_hidden = Qwen3_5MoeRMSNorm(width, eps=eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([Qwen3_5MoeDecoderLayer(one_layer, 0)])
        self.norm = Qwen3_5MoeRMSNorm(width, eps=eps)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, embedding: Tensor, hidden: Tensor, position: tuple[Tensor, Tensor]) -> Tensor:
        """Map two [B, T, H] inputs to the normed [B, T, H] that the trunk's output head reads."""
        joined = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1)
        return self.norm(self.layers[0](self.fc(joined), position_embeddings=position, attention_mask=None))


class DemoNetwork(nn.Module):
    """Trunk and MTP head together."""

    def __init__(self, config: Qwen3_5MoeTextConfig) -> None:
        super().__init__()
        self.config = config
        self.trunk = Qwen3_5MoeForCausalLM(config)
        self.mtp = MtpHead(config)
        for module in self.trunk.modules():
            if hasattr(module, "A_log"):
                module.A_log.data.uniform_(0.1, 4).log_()
                module.dt_bias.data.normal_(-2, 1)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the trunk's hidden states after the final norm, [B, T, H]."""
        return self.trunk.model(input_ids=ids, use_cache=False).last_hidden_state

    def draft_logits(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the MTP head's logits [B, T-2, V]: row p is its guess at token p+2."""
        places = torch.arange(ids.shape[1] - 2)[None].expand(3, ids.shape[0], -1)
        position = self.trunk.model.rotary_emb(hidden, places)
        embedding = self.trunk.model.embed_tokens(ids[:, 1:-1]).detach()
        return F.linear(self.mtp(embedding, hidden[:, :-2], position), self.trunk.lm_head.weight.detach())

    def trunk_loss(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Return the weighted next-token cross-entropy in nats; ids and weight are [B, T]."""
        weight = weight[:, 1:]
        counted = weight > 0
        logits = self.trunk.lm_head(self.hidden(ids)[:, :-1][counted]).float()
        each = F.cross_entropy(logits, ids[:, 1:][counted], reduction="none")
        return (each * weight[counted]).sum() / weight.sum()

    def mtp_loss(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Return the MTP head's cross-entropy against the frozen trunk's own distribution there."""
        with torch.no_grad():
            hidden = self.hidden(ids)
            target = self.trunk.lm_head(hidden[:, 1:-1]).float().softmax(-1)
        each = -(target * self.draft_logits(ids, hidden).float().log_softmax(-1)).sum(-1)
        return (each * weight[:, 2:]).sum() / weight[:, 2:].sum()

    @torch.no_grad()
    def agreement(self, ids: Tensor, weight: Tensor) -> tuple[float, float]:
        """Return the trunk's nats a token and the share of places where both heads' first choices agree."""
        hidden = self.hidden(ids)
        logits = self.trunk.lm_head(hidden[:, :-1]).float()
        each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (each * weight[:, 1:].flatten()).sum() / weight[:, 1:].sum()
        same = (self.draft_logits(ids, hidden).argmax(-1) == logits[:, 1:].argmax(-1)).float()
        return float(loss), float((same * weight[:, 2:]).sum() / weight[:, 2:].sum())

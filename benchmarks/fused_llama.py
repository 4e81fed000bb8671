"""Llama with fused QKV and gate/up projections, as serving engines have them: one product in place of three, and of two."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, apply_rotary_pos_emb


class FusedAttention(LlamaAttention):
    """A layer's attention with one product for q, k and v, over a cache."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        shape = hidden_states.shape[:-1]
        parts = linear(hidden_states, self.qkv_weight).split(
            [module.out_features for module in (self.q_proj, self.k_proj, self.v_proj)], -1
        )
        q, k, v = (part.view(*shape, -1, self.head_dim).transpose(1, 2) for part in parts)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = past_key_values.update(k, v, self.layer_idx)
        attend = AttentionInterface()[self.config._attn_implementation]
        out, weights = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*shape, -1).contiguous()), weights


class FusedMLP(LlamaMLP):
    """A layer's MLP with one product for gate and up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = linear(x, self.gate_up_weight).chunk(2, -1)
        return self.down_proj(self.act_fn(gate) * up)  # type: ignore[no-any-return]


def fuse(model: Any, on: bool) -> None:
    """Switch a Llama model to fused products, or back. Its modules' weights become parts of the joint ones, so it needs no more memory."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        if on and not hasattr(mlp, "gate_up_weight"):
            attention.qkv_weight = _joint(attention.q_proj, attention.k_proj, attention.v_proj)
            mlp.gate_up_weight = _joint(mlp.gate_proj, mlp.up_proj)
        attention.__class__ = FusedAttention if on else LlamaAttention
        mlp.__class__ = FusedMLP if on else LlamaMLP


def unfuse(model: Any) -> None:
    """Switch back, and forget the joint weights, so that they go with the modules' own."""
    fuse(model, on=False)
    for layer in model.model.layers:
        for module, name in ((layer.self_attn, "qkv_weight"), (layer.mlp, "gate_up_weight")):
            if hasattr(module, name):
                delattr(module, name)


def _joint(*modules: nn.Linear) -> torch.Tensor:
    """The weights of all modules, which keep views of them."""
    joint = torch.cat([module.weight.data for module in modules])
    for module, part in zip(modules, joint.split([module.out_features for module in modules]), strict=True):
        module.weight.data = part
    return joint

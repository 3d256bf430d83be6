"""OLMo 2 ("2 OLMo 2 Furious", 2024), with its export to transformers and GGUF.

raytrain-gpt train --code olmo2.py --architecture olmo2

Its norms follow attention and MLP; those of queries and keys are over all heads.

Shapes: B sequences, T tokens, D channels, H query heads of C channels, K key-value heads.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from raytrain_gpt.extend import GPT, Block, Field, LlamaSettings, architecture


class Olmo2Settings(LlamaSettings):
    """Settings as in Llama, with other defaults."""

    tied_embeddings: bool = False
    """Share one matrix between embedding and output head; llama.cpp has no OLMo 2 that does."""
    rope_theta: float = Field(500_000.0, ge=1)
    """Base of the rotary positions' wavelengths."""

    def check(self, section):
        super().check(section)
        if self.rope_factor != 1:
            raise ValueError("rope_factor does not apply to olmo2; set it to 1")


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.head_size, size = shape.head_size, shape.embd_size
        kv_size = shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(size, shape.attention_size, bias=False)
        self.k_proj = nn.Linear(size, kv_size, bias=False)
        self.v_proj = nn.Linear(size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.attention_size, size, bias=False)

    def forward(self, x, attend):
        q, k, v = (
            project(x).unflatten(2, (-1, self.head_size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # (B, H, T, C), keys and values (B, K, T, C)
        return self.o_proj(attend(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.embd_size, shape.mlp_size, bias=False)
        self.up_proj = nn.Linear(shape.embd_size, shape.mlp_size, bias=False)
        self.down_proj = nn.Linear(shape.mlp_size, shape.embd_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Olmo2Block(Block):
    def __init__(self, shape):
        super().__init__()
        eps = shape.settings.norm_eps
        self.q_norm = nn.RMSNorm(shape.attention_size, eps=eps)
        self.k_norm = nn.RMSNorm(shape.num_kv_heads * shape.head_size, eps=eps)
        self.attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.embd_size, eps=eps)
        self.mlp = MLP(shape)
        self.post_feedforward_layernorm = nn.RMSNorm(shape.embd_size, eps=eps)

    def layers(self, x, attend):
        def attend_normed(q, k, v):
            return attend(over_heads(self.q_norm, q), over_heads(self.k_norm, k), v)

        x = x + self.post_attention_layernorm(self.attn(x, attend_normed))
        return x + self.post_feedforward_layernorm(self.mlp(x))


def over_heads(norm, x):
    """Normalize all heads (B, H, T, C) together."""
    return norm(x.transpose(1, 2).flatten(2)).unflatten(2, (-1, x.shape[-1])).transpose(1, 2)


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


@architecture("olmo2", Olmo2Settings)
class Olmo2(GPT):
    @classmethod
    def resolved(cls, shape):
        """Set key-value heads, and 8/3 of the width for the MLP, if open."""
        size = shape.settings.mlp_size or max(1, round(8 * shape.embd_size / 3 / 64)) * 64
        given = {"num_kv_heads": shape.num_kv_heads, "mlp_size": size}
        return replace(shape, settings=shape.settings.model_copy(update=given))

    def make_layers(self, shape):
        self.wte = nn.Embedding(shape.padded_vocab_size, shape.embd_size)
        self.h = nn.ModuleList(Olmo2Block(shape) for _ in range(shape.num_layers))
        self.ln_f = nn.RMSNorm(shape.embd_size, eps=shape.settings.norm_eps)
        if not shape.settings.tied_embeddings:
            self.lm_head = nn.Linear(shape.embd_size, shape.padded_vocab_size, bias=False)

    @property
    def head_weight(self):
        return self.wte.weight if self.shape.settings.tied_embeddings else self.lm_head.weight

    def init_weights(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02, generator=generator)

    def embed(self, ids, positions):
        return self.wte(ids)  # (B, T, D); positions enter in the attention

    def positioned(self, positions):
        """Rotate queries and keys by positions (B, T) or (T,)."""
        half = self.shape.head_size // 2
        exponents = torch.arange(half, device=positions.device) / half
        angles = positions[..., None] * self.shape.settings.rope_theta**-exponents
        if positions.dim() == 2:
            angles = angles[:, None]  # the same for all heads
        cos, sin = angles.cos(), angles.sin()
        return lambda attend: lambda q, k, v: attend(rotated(q, cos, sin), rotated(k, cos, sin), v)

    # Optional: what `export` needs.
    DESCRIPTION = "An OLMo 2 (rotary positions, RMSNorm after attention and gated MLP)"

    @staticmethod
    def config_of(shape):
        """config.json of transformers."""
        return {
            "architectures": ["Olmo2ForCausalLM"],
            "model_type": "olmo2",
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": shape.seq_len,
            "hidden_size": shape.embd_size,
            "intermediate_size": shape.mlp_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_size,
            "hidden_act": "silu",
            "rms_norm_eps": shape.settings.norm_eps,
            "rope_theta": shape.settings.rope_theta,
            "rope_parameters": {"rope_theta": shape.settings.rope_theta, "rope_type": "default"},
            "attention_bias": False,
            "tie_word_embeddings": shape.settings.tied_embeddings,
        }

    @staticmethod
    def to_hf(name, tensor):
        """Name and layout in transformers."""
        renamed = {"wte.": "model.embed_tokens.", "h.": "model.layers.", "ln_f.": "model.norm."}
        for ours, theirs in renamed.items():
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
        for norm in ("q_norm", "k_norm"):
            name = name.replace(f".{norm}.", f".self_attn.{norm}.")
        return name.replace(".attn.", ".self_attn."), tensor

    @staticmethod
    def add_gguf_sizes(writer, shape):
        writer.add_feed_forward_length(shape.mlp_size)
        writer.add_head_count_kv(shape.num_kv_heads)
        writer.add_key_length(shape.head_size)
        writer.add_value_length(shape.head_size)
        writer.add_rope_freq_base(shape.settings.rope_theta)
        writer.add_layer_norm_rms_eps(shape.settings.norm_eps)

"""Tiny random verifiers, written as Hugging Face folders: what every test of this repository uses instead of a download.

Each `toy_*` function writes config, weights and a working fast tokenizer with a chat template into `path` and returns `path`.
Weights are float32 and depend on `seed` alone. The final norm's gain is drawn from 0.1 to 3, so that code which forgets it is
wrong by a lot.
Keyword arguments override keys of the model's config: `toy_llama(tmp_path, num_hidden_layers=8)`.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import (
    CLIPVisionConfig,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 64
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CHARACTERS = string.ascii_lowercase + string.digits + " \n.,:;?!'\"()-+*/=<>#"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def toy_llama(path: Path, *, seed: int = 0, shards: bool = False, **overrides: Any) -> Path:
    """Llama: plain gain, untied unless overridden. `shards` writes several safetensors files and their index."""
    return _write(path, LlamaForCausalLM, LlamaConfig(**{**SIZES, **overrides}), seed, shards)


def toy_llama_tied(path: Path, *, seed: int = 0, shards: bool = False, **overrides: Any) -> Path:
    """Llama whose head is its embedding and is therefore not stored."""
    return toy_llama(path, seed=seed, shards=shards, tie_word_embeddings=True, **overrides)


def toy_llama_rope(path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Llama with the "llama3" rotary scaling."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return toy_llama(path, seed=seed, rope_parameters=rope, **overrides)


def toy_qwen3(path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Qwen3: query and key norms, plain gain, untied."""
    return _write(path, Qwen3ForCausalLM, Qwen3Config(**{**SIZES, **overrides}), seed)


def toy_gemma3(path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Gemma 3 text: gain 1 + w, tied, embeddings scaled by sqrt(hidden), two rotary sets, capped logits, sliding layers."""
    own = {"tie_word_embeddings": True, "sliding_window": 8, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}
    return _write(path, Gemma3ForCausalLM, Gemma3TextConfig(**{**SIZES, **own, **overrides}), seed)


def toy_granite(path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Granite: logits are divided by `logits_scaling`, embeddings multiplied by `embedding_multiplier`."""
    own = {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    return _write(path, GraniteForCausalLM, GraniteConfig(**{**sizes, **own, **overrides}), seed)


def toy_glm5(path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """GLM-5 (`glm_moe_dsa`): latent attention with an indexer, one dense layer, then experts; decoder layers return tuples."""
    own = {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "index_topk": 64,  # above the tests' lengths: ties of the indexer's relu scores would make it depend on the batch shape
        "index_head_dim": 16,
        "index_n_heads": 2,
    }
    return _write(path, GlmMoeDsaForCausalLM, GlmMoeDsaConfig(**{**SIZES, **own, **overrides}), seed)


def toy_multimodal(path: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Llava around a Llama: sizes only inside `text_config`, decoder one level down."""
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = LlamaConfig(**{**SIZES, **overrides})
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=VOCAB - 1, tie_word_embeddings=False)
    return _write(path, LlavaForConditionalGeneration, config, seed)


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character (lower case), `VOCAB` ids, special tokens for the roles, template without generation markers."""
    words = (SPECIAL_TOKENS + list(CHARACTERS))[:VOCAB]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def stored_weights(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder, whatever its files."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _write(path: Path, model_class: type[PreTrainedModel], config: Any, seed: int, shards: bool = False) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).eval()
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight") and "layers." not in name:
                one_plus = config.model_type.startswith("gemma3")
                torch.nn.init.uniform_(weight, 0.1 - one_plus, 3.0 - one_plus)
    model.save_pretrained(path, max_shard_size="40KB" if shards else "5GB")
    toy_tokenizer().save_pretrained(path)
    return path

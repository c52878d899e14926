"""What kind of model a verifier is: sizes, final norm, logit scale, rotary parameters. Reads config.json, no weights.

Where a family's config does not tell (is the final norm's gain w or 1 + w?), the family's own class is built on the meta device
and measured, so there is no list of families to keep up to date.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from eagle3_fast.errors import InputError
from eagle3_fast.files import read_json
from eagle3_fast.log import say_once

NormGain = Literal["plain", "one_plus", "unit"]
"""How the final norm scales: by its weight w, by 1 + w (Gemma, Qwen3-Next), or not at all (it has no weight)."""

LOGITS_SCALING_MULTIPLIES = ("hyperclovax",)
"""Families whose `logits_scaling` multiplies; Granite, MiniCPM3 and their kin divide by it."""


@dataclass(frozen=True)
class VerifierShape:
    """A verifier's text decoder, as its config and its class define it.

    logits = cap(logit_scale * head @ (normed state * gain)), cap(x) = softcap * tanh(x / softcap) where `logit_softcap` is set.
    `embedding_scale` is what the verifier multiplies its embeddings by; EAGLE drafts embed with the plain stored matrix.
    `rope_parameters` is one flat set; of several per-layer-type sets it is the one of the sliding layers, as in speculators.
    `rope_interleaved` tells that rotary pairs are neighbours (2i, 2i + 1) rather than halves.
    """

    path: Path
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    norm_gain: NormGain
    tie_word_embeddings: bool
    logit_scale: float
    logit_softcap: float | None
    embedding_scale: float
    dtype: torch.dtype | None  # None: the config does not say
    rope_parameters: dict[str, Any]
    rope_interleaved: bool
    config: dict[str, Any] = field(repr=False)  # the text part's config

    def logits(self, states: Tensor, norm: Tensor, head: Tensor) -> Tensor:
        """The verifier's logits from states taken before its final norm.

        Args:
            states: [..., G], any float dtype. Norm in float32, product in the head's dtype, as the verifier itself does.
            norm: gain [G], float32, 1 already added where the verifier adds it.
            head: [V or any rows, G].

        Returns:
            float32 [..., rows of head].
        """
        states = states.float()
        normed = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.rms_norm_eps)
        if self.norm_gain == "plain":  # round where Llama rounds: before the gain
            normed = normed.to(head.dtype) * norm.to(head.dtype)
        else:
            normed = (normed * norm).to(head.dtype)
        logits = (normed @ head.T).float() * self.logit_scale
        return logits if self.logit_softcap is None else self.logit_softcap * torch.tanh(logits / self.logit_softcap)


def local_folder(name_or_path: str | Path) -> Path:
    """The folder of a verifier given as a folder or as an id that the Hugging Face cache holds. Raises InputError."""
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    try:
        return Path(snapshot_download(str(name_or_path), local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise InputError(
            f"{name_or_path}: neither a folder nor in the Hugging Face cache; point "
            "train.verifier.verifier_name_or_path to a folder"
        ) from None


def load_config(folder: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a verifier folder. An unknown or malformed one is an InputError."""
    raw = read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if model_type not in CONFIG_MAPPING and not (trust_remote_code and "auto_map" in raw):
        remedy = "set train.verifier.trust_remote_code" if "auto_map" in raw else "upgrade transformers or correct config.json"
        known = ", ".join(name for name in ("llama", "qwen3", "gemma3", "gpt_oss", "glm_moe_dsa") if name in CONFIG_MAPPING)
        raise InputError(
            f"{folder}: this transformers does not know model_type {model_type!r} (it knows {known} and {len(CONFIG_MAPPING)} "
            f"types in all); {remedy}"
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise InputError(f"{folder}/config.json cannot be used: {' '.join(str(error).split())}") from None


def model_class(config: PreTrainedConfig) -> Any:
    """The auto class that holds the verifier's head: a causal model, or a multimodal wrapper around one."""
    remote = getattr(config, "auto_map", None) or {}
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in remote:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or "AutoModelForImageTextToText" in remote:
        return AutoModelForImageTextToText
    raise InputError(f"{config.model_type}: transformers has no language model with a head for it; take a text-generation verifier")


def text_decoder(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The text decoder inside `model`, however deep it lies, and its list of decoder layers.

    Searched from the decoder that the model itself names, so that a vision tower with as many layers is not taken for it.
    Raises InputError when no list has the length the config gives.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.get_decoder().modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, child
    raise InputError(f"{type(model).__name__}: found no list of {count} decoder layers; this family cannot be a verifier here")


def final_norm(decoder: nn.Module) -> nn.Module:
    """The norm between the last decoder layer and the head. Raises InputError when there is none or more than one."""
    norms = {name: child for name, child in decoder.named_children() if "norm" in type(child).__name__.lower()}
    if "norm" in norms:
        return norms["norm"]
    if len(norms) == 1:
        return next(iter(norms.values()))
    raise InputError(f"{type(decoder).__name__}: cannot tell its final norm among {sorted(norms) or 'no norms'}")


def verifier_shape(path: str | Path, trust_remote_code: bool = False) -> VerifierShape:
    """Sizes and numeric conventions of the verifier in `path` (a folder, or an id in the Hugging Face cache).

    Raises:
        InputError: not a Hugging Face folder, an unknown family, sizes missing, or a final norm that is no RMSNorm.
    """
    folder = local_folder(path)
    config = load_config(folder, trust_remote_code)
    text = config.get_text_config(decoder=True)
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        if not isinstance(getattr(text, name, None), int):
            raise InputError(f"{folder}/config.json: {name} is missing, at the top and in text_config")
    # The text part alone where it is a model of its own: a wrapper may need packages for its vision tower.
    built = text if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else config
    with torch.device("meta"):
        model = model_class(built).from_config(built, trust_remote_code=trust_remote_code)
    decoder, _ = text_decoder(model)
    eps, gain = _measured_norm(final_norm(decoder), text.hidden_size, getattr(text, "rms_norm_eps", None))
    softcap = next((v for k in ("final_logit_softcapping", "logits_soft_cap") if (v := getattr(text, k, None))), None)
    dtype = getattr(text, "dtype", None) or getattr(config, "dtype", None)
    return VerifierShape(
        path=folder,
        model_type=config.model_type,
        architectures=tuple(config.architectures or ()),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_hidden_layers=text.num_hidden_layers,
        rms_norm_eps=eps,
        norm_gain=gain,
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        logit_scale=_logit_scale(text),
        logit_softcap=softcap,
        embedding_scale=_embedding_scale(text, decoder),
        dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        rope_parameters=_rope_parameters(text, read_json(folder / "config.json"), folder),
        rope_interleaved=_rope_interleaved(text, decoder),
        config=text.to_dict(),
    )


def _measured_norm(norm: nn.Module, width: int, config_eps: float | None) -> tuple[float, NormGain]:
    """Run the norm on small random rows, for which epsilon matters, and see which formula gives its result."""
    names = ("variance_epsilon", "eps", "epsilon", "norm_eps")
    eps = next((value for name in names if isinstance(value := getattr(norm, name, None), float)), config_eps)
    generator = torch.Generator().manual_seed(0)
    norm = norm.to_empty(device="cpu").float()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        if eps is not None:
            rows = (torch.randn(4, width, generator=generator) + 0.5) * 3 * math.sqrt(eps)
            normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
            weight = getattr(norm, "weight", None)
            gains: dict[NormGain, Tensor | float]
            gains = {"unit": 1.0} if weight is None else {"plain": weight, "one_plus": 1 + weight}
            for kind, gain in gains.items():
                if torch.allclose(norm(rows), normed * gain, rtol=1e-3):
                    return eps, kind
    raise InputError(f"the verifier's final norm, {type(norm).__name__}, is no RMSNorm: EAGLE-3 drafts cannot follow this family")


def _logit_scale(text: PreTrainedConfig) -> float:
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        scale *= getattr(text, name, None) or 1.0
    scaling = getattr(text, "logits_scaling", None) or 1.0
    return scale * scaling if text.model_type.startswith(LOGITS_SCALING_MULTIPLIES) else scale / scaling


def _embedding_scale(text: PreTrainedConfig, decoder: nn.Module) -> float:
    embedding = getattr(decoder, "embed_tokens", None)
    scales = (getattr(embedding, "scalar_embed_scale", None), getattr(text, "embedding_multiplier", None), 1.0)
    return float(next(scale for scale in scales if scale is not None))


def _rope_parameters(text: PreTrainedConfig, raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The one set of rotary parameters a draft inherits; transformers has already moved old fields to their new place."""
    parameters = getattr(text, "rope_parameters", None)
    if parameters is None:  # configs of remote code keep the old fields
        parameters = {"rope_type": "default", **(getattr(text, "rope_scaling", None) or {})}
        if getattr(text, "rope_theta", None):
            parameters.setdefault("rope_theta", text.rope_theta)
    nested = [name for name, value in parameters.items() if isinstance(value, dict) and "rope_theta" in value]
    if nested:
        chosen = "sliding_attention" if "sliding_attention" in nested else nested[0]
        say_once(f"{folder}: has rotary sets {', '.join(nested)}; the draft takes {chosen}")
        parameters = parameters[chosen]
    if not _mentions(raw, ("rope_theta", "rope_local_base_freq")):
        parameters.setdefault("rope_theta", 10000.0)
        say_once(f"{folder}/config.json: no rope_theta; its family's default {parameters['rope_theta']} is taken")
    return dict(parameters)


def _mentions(value: Any, names: tuple[str, ...]) -> bool:
    return isinstance(value, dict) and any(key in names or _mentions(inner, names) for key, inner in value.items())


def _rope_interleaved(text: PreTrainedConfig, decoder: nn.Module) -> bool:
    if getattr(text, "rope_interleave", None) is not None:
        return bool(text.rope_interleave)
    module = sys.modules[type(decoder).__module__]
    if hasattr(module, "rotate_half"):
        return module.rotate_half(torch.arange(4.0)).tolist() == [-1.0, 0.0, -3.0, 2.0]
    return hasattr(module, "apply_rotary_pos_emb_interleave") or text.model_type.startswith("llama4")

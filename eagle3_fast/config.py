"""The run file: one YAML document that every verb reads.

The groups under `train:` carry the names and defaults of speculators 0.9, so that a file of theirs reads here; our own sections
stand beside `train:` and share their name with the verb or part that they steer. Unknown keys are errors that name the nearest
known key. Precedence: command line (`section.key=value`) over file over default.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from eagle3_fast.errors import InputError


class Section(BaseModel):
    """A group of keys; unknown keys are refused, values are frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# --- groups under `train:`, names and defaults of speculators 0.9 -----------------------------------------------------


class VerifierSection(Section):
    verifier_name_or_path: str = Field(description="Hugging Face folder (or cached id) of the verifier")
    trust_remote_code: bool = False


SHAPING_KEYS = {
    "num_layers",
    "draft_arch",
    "draft_hidden_act",
    "sliding_window",
    "full_attention_indices",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
}
"""Keys of `train.draft` that shape a new draft."""


class DraftSection(Section):
    from_pretrained: str = Field("", description="folder with a speculators config.json, with or without weights")
    num_layers: int = Field(1, ge=1)
    draft_arch: Literal["llama", "qwen3"] = "llama"
    draft_hidden_act: Literal["silu"] = "silu"
    target_layer_ids: list[int] | None = Field(None, description="aux layers, id = decoder layers applied; default [2, n//2, n-3]")
    token_freq_path: str | None = None
    draft_vocab_size: int | None = Field(None, ge=1, description="none: the verifier's full vocabulary")
    d2t_path: str | None = None
    t2d_path: str | None = None
    norm_before_residual: bool = True
    norm_before_fc: bool = True
    fc_norm: bool = False
    norm_output: bool = True
    sliding_window: int = Field(2048, ge=1)
    full_attention_indices: list[int] = Field([], description="draft layers without the sliding window")

    @model_validator(mode="after")
    def _one_definition(self) -> DraftSection:
        clash = sorted(self.model_fields_set & SHAPING_KEYS) if self.from_pretrained else []
        if clash:
            raise ValueError(f"from_pretrained brings its own config, so {', '.join(clash)} cannot be given beside it")
        return self

    @model_validator(mode="after")
    def _one_fusion_norm(self) -> DraftSection:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: set train.draft.norm_before_fc to false")
        if (self.d2t_path is None) != (self.t2d_path is None):
            raise ValueError("d2t_path and t2d_path go together: give both or none")
        return self


class DataSection(Section):
    data_path: str = Field("./output", description="folder that prepare writes and train reads")
    total_seq_len: int = Field(8192, ge=2, description="rows of a packed batch")
    train_data_ratio: float = Field(
        0.9, gt=0, le=1, description="share of rows for training; the rest, taken from the end, validates"
    )
    hidden_states_dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="dtype of the hidden states and of autocast"
    )
    num_workers: int = Field(0, ge=0)
    prefetch_factor: int = Field(4, ge=1)


class GenerationSection(Section):
    on_missing: Literal["generate", "skip", "warn", "raise"] = Field(
        "raise", description="a sample without usable hidden states; generate = compute them on the fly"
    )


class LossSection(Section):
    loss_fn: str = Field("kl_div", description='name, or a JSON object of weights such as {"kl_div": 0.5, "tv": 0.5}')
    ttt_steps: int = Field(3, ge=1)
    ttt_step_loss_decay: float = Field(1.0, gt=0)

    @field_validator("loss_fn", mode="before")
    @classmethod
    def _mapping_as_text(cls, value: Any) -> Any:
        return json.dumps(value) if isinstance(value, dict) else value

    @field_validator("loss_fn")
    @classmethod
    def _known_terms(cls, value: str) -> str:
        parse_loss(value)
        return value

    @property
    def terms(self) -> dict[str, float]:
        return parse_loss(self.loss_fn)


class OptimizerSection(Section):
    optimizer: Literal["adamw", "muon"] = "muon"
    lr: float = Field(1e-3, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    muon_lr: float | None = Field(None, gt=0, description="none: lr")
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    muon_weight_decay: float = Field(0.1, ge=0)
    muon_ns_steps: int = Field(5, ge=1)
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"


class SchedulerSection(Section):
    scheduler_type: Literal["linear", "cosine", "none"] = "linear"
    scheduler_warmup_steps: int | None = Field(None, ge=0)
    scheduler_warmup_ratio: float | None = Field(None, ge=0, le=1)
    scheduler_total_steps: int | None = Field(None, ge=1)
    scheduler_num_cosine_cycles: float = Field(0.5, gt=0)


class TrainerSection(Section):
    epochs: int = Field(20, ge=1)
    save_path: str = "./output/checkpoints"
    max_steps: int | None = Field(None, ge=1)
    checkpoint_freq: float = Field(1.0, gt=0, description="epochs between checkpoints; below 1, a share of an epoch")
    no_resume_from_checkpoint: bool = False
    log_freq: int = Field(1, ge=1, description="write metrics every so many optimizer steps")

    @field_validator("checkpoint_freq")
    @classmethod
    def _whole_epochs(cls, value: float) -> float:
        if value > 1 and value != int(value):
            raise ValueError(f"above 1 it must be a whole number of epochs, not {value}")
        return value


class LoggingSection(Section):
    logger: Literal["", "tensorboard"] = ""
    log_dir: str = "./logs"
    run_name: str | None = None


class TrainSection(Section):
    """What speculators calls the training config."""

    speculator_type: Literal["eagle3"] = "eagle3"
    seed: int = 42
    verifier: VerifierSection
    draft: DraftSection = DraftSection()
    data: DataSection = DataSection()
    generation: GenerationSection = GenerationSection()
    loss: LossSection = LossSection()
    optimizer: OptimizerSection = OptimizerSection()
    scheduler: SchedulerSection = SchedulerSection()
    trainer: TrainerSection = TrainerSection()
    logging: LoggingSection = LoggingSection()


# --- our own sections --------------------------------------------------------------------------------------------------


class PrepareSection(Section):
    data: list[str] = Field([], description="JSON, JSONL or Parquet files, or `datasets` folders")
    seq_length: int = Field(2048, ge=2, description="tokens at which a conversation is cut")
    minimum_valid_tokens: int = Field(1, ge=1, description="supervised tokens a row must have")
    max_samples: int | None = Field(None, ge=1)
    num_workers: int = Field(2, ge=1)
    supervise_template_reasoning: bool = Field(
        False, description="supervise empty reasoning tags that the template inserts and the verifier never emits"
    )


class RegenerateSection(Section):
    prompts: list[str] = Field([], description="files of prompts (any form that prepare reads)")
    output: str = "./output/chats.jsonl"
    max_new_tokens: int = Field(256, ge=1)
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    batch_size: int = Field(32, ge=1)


class ExtractSection(Section):
    hidden_states_path: str | None = Field(None, description="none: <data_path>/hidden_states")
    batch_tokens: int = Field(4096, ge=1, description="tokens of one verifier forward, padding included")
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    minimum_agreement: float = Field(
        0.98, ge=0, le=1, description="share of positions at which stored states must give the verifier's own argmax"
    )


class OpsSection(Section):
    impl: Literal["auto", "fused", "reference"] = "auto"
    logits: Literal["centred", "float32", "bfloat16"] = Field(
        "centred",
        description="storage of logits in fused ops: bfloat16 relative to a likely token, float32 (slower where the "
        "hardware multiplies bfloat16), or plain bfloat16 (several percent of error in gradients)",
    )


class EngineSection(Section):
    compat: Literal["0.9", "0.3"] = Field(
        "0.9",
        description="0.9: teacher-forced tokens, verifier norm, frozen head; 0.3: argmax tokens, no verifier norm, trainable head",
    )
    use_off_policy_tokens: bool | None = Field(None, description="teacher-force tokens; none: as compat says")
    mask_rule: Literal["upstream", "label"] = Field(
        "upstream", description="which token's mask weighs a row: its input token (speculators) or the token it predicts"
    )
    accumulation: int = Field(1, ge=1, description="packed batches of one optimizer step")
    max_grad_norm: float = Field(1.0, gt=0)
    divisor: Literal["step", "batch"] = Field(
        "step", description="supervised tokens of the whole optimizer step, or of each packed batch (speculators)"
    )
    recompute: bool = Field(
        False,
        description="run the feed-forward half of every TTT step again in the backward pass: keeps a quarter of the activations",
    )
    on_nan: Literal["stop", "skip"] = Field("stop", description="a step whose loss or gradient is not finite")
    deterministic: bool = Field(True, description="bit-exact kernels where torch has a choice")


class DeepSpeedSection(Section):
    """How several processes share a run; read only where a launcher started them."""

    stage: Literal[0, 1, 2, 3] = Field(3, description="ZeRO: what is split over the ranks; 1 optimizer, 2 gradients too, 3 weights too")
    offload_optimizer: bool = Field(False, description="keep masters and optimizer states in host memory and update them there")
    overlap_communication: bool = Field(True, description="reduce gradients while the backward pass goes on")
    config: str | None = Field(None, description="DeepSpeed JSON whose keys are added to those that the run file sets")
    join_timeout: float = Field(120, gt=0, description="seconds to wait for all ranks at the start, and for one collective then")


class EvaluateSection(Section):
    prompts: list[str] = Field([], description="files of prompts outside the training set")
    draft_tokens: int = Field(3, ge=1, description="tokens drafted before each verifier pass")
    max_new_tokens: int = Field(128, ge=1)
    max_prompts: int | None = Field(None, ge=1)
    temperature: float = Field(0.0, ge=0)
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of verifier and draft")
    output: str = "./output/evaluation.json"


class ExportSection(Section):
    output: str = "./output/draft"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


class RunConfig(Section):
    """The whole run file."""

    train: TrainSection
    prepare: PrepareSection = PrepareSection()
    regenerate: RegenerateSection = RegenerateSection()
    extract: ExtractSection = ExtractSection()
    ops: OpsSection = OpsSection()
    engine: EngineSection = EngineSection()
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    evaluate: EvaluateSection = EvaluateSection()
    export: ExportSection = ExportSection()

    @property
    def hidden_states_path(self) -> Path:
        return Path(self.extract.hidden_states_path or Path(self.train.data.data_path) / "hidden_states")


LOSS_TERMS = ("kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid")


def parse_loss(text: str) -> dict[str, float]:
    """`kl_div` or `{"ce": 0.1, "tv": 0.9}` as weights by term name. Raises ValueError with the known names."""
    if not text.lstrip().startswith("{"):
        terms: Any = {text: 1.0}
    else:
        try:
            terms = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"loss_fn is not valid JSON: {error}") from None
    if not isinstance(terms, dict) or not terms:
        raise ValueError(f"loss_fn must name at least one of {', '.join(LOSS_TERMS)}")
    for name, weight in terms.items():
        if name not in LOSS_TERMS:
            raise ValueError(f"unknown loss {name!r}{_nearest(name, LOSS_TERMS)}; known: {', '.join(LOSS_TERMS)}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or weight == 0:
            raise ValueError(f"the weight of loss {name!r} must be a number other than 0, not {weight!r}")
    return {name: float(weight) for name, weight in terms.items()}


def load_run_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run file and apply `section.key=value` overrides. Any fault is an `InputError` naming file, key and remedy."""
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such run file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: a run file is a mapping with a `train:` section, this is {type(document).__name__}")
    for override in overrides or []:
        _apply_override(document, override)
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise InputError(f"{path}: " + "; ".join(_explain(item) for item in error.errors())) from None


def _apply_override(document: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator:
        raise InputError(f"override {override!r} is not of the form section.key=value")
    *groups, leaf = key.split(".")
    for group in groups:
        document = document.setdefault(group, {})
        if not isinstance(document, dict):
            raise InputError(f"override {override!r}: {group} is not a section")
    try:
        document[leaf] = yaml.safe_load(value) if value else ""
    except yaml.YAMLError as error:
        raise InputError(f"override {override!r}: its value is not valid YAML: {' '.join(str(error).split())}") from None


def _explain(item: Any) -> str:
    """One pydantic error as `where: what`, with the nearest known key for an unknown one."""
    where = ".".join(str(part) for part in item["loc"]) or "run file"
    if item["type"] == "extra_forbidden":
        return f"unknown key {where}{_nearest(str(item['loc'][-1]), known_keys())}"
    if item["type"] == "missing":
        return f"{where} is required"
    return f"{where}: {item['msg'].removeprefix('Value error, ')}"


def _nearest(name: str, known: Any) -> str:
    leaves = {key.rpartition(".")[2]: key for key in known}
    match = difflib.get_close_matches(name, leaves, n=1, cutoff=0.5)
    return f"; did you mean {leaves[match[0]]}?" if match else ""


def known_keys(section: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Every key of the run file in dotted form."""
    keys = []
    for name, info in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            keys += known_keys(info.annotation, f"{prefix}{name}.")
    return keys

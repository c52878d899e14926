"""The run file: one YAML document that every verb reads.

The groups under `train:` carry the names and defaults of speculators 0.9, so that a file of theirs reads here; what its releases
spell otherwise is in `spellings`. Our own sections stand beside `train:` and share their name with the verb or part that they
steer. Unknown keys are errors that name the nearest known key. Precedence: flag over `section.key=value` over file over default.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from eagle3_fast.errors import InputError
from eagle3_fast.log import say_once
from eagle3_fast.spellings import ALGORITHMS, GROUPS, KEYS, canonical


class Section(BaseModel):
    """A group of keys; unknown keys are refused, values are frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# --- groups under `train:`, names and defaults of speculators 0.9 -----------------------------------------------------


class VerifierSection(Section):
    verifier_name_or_path: str = Field(description="Hugging Face folder (or cached id) of the verifier")
    trust_remote_code: bool = False


SHAPING_KEYS = ("num_layers", "draft_arch", "draft_hidden_act", "sliding_window", "full_attention_indices")
"""Keys of `train.draft` that shape the decoder of a new draft; another source of it excludes them, even at their defaults."""
NORM_KEYS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Keys of `train.draft` that a whole draft config overrules, as in speculators."""


class DraftSection(Section):
    from_pretrained: str = Field("", description="folder with a speculators config.json, with or without weights")
    draft_config: str = Field(
        "", description="decoder config of a new draft (folder or JSON file) in place of the verifier's sizes"
    )
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

    @model_validator(mode="before")
    @classmethod
    def _norms_of_pretrained(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not data.get("from_pretrained"):
            return data
        overruled = [name for name in NORM_KEYS if name in data]
        if overruled:
            say_once(f"train.draft.from_pretrained brings its own config: {', '.join(overruled)} not used")
        return {name: value for name, value in data.items() if name not in overruled}

    @model_validator(mode="after")
    def _one_definition(self) -> DraftSection:
        sources = [name for name in ("from_pretrained", "draft_config") if getattr(self, name)]
        clash = [*sources[1:], *sorted(self.model_fields_set & set(SHAPING_KEYS))] if sources else []
        if clash:
            raise ValueError(f"{sources[0]} brings its own config, so {', '.join(clash)} cannot be given beside it")
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
    vllm_endpoint: str = Field(
        "",
        description="vLLM server that gives hidden states (`serve-verifier`), such as http://127.0.0.1:8000; empty: the verifier "
        "runs in this process",
    )
    on_missing: Literal["generate", "skip", "warn", "raise"] = Field(
        "raise", description="a sample without usable hidden states; generate = compute them on the fly"
    )
    request_timeout: float = Field(120, gt=0, description="seconds to wait for the server's answer, and again for its file")
    max_retries: int = Field(3, ge=0, description="tries after the first; the pauses between them are 2, 4, 8, ... seconds")
    generation_validation_retries: int = Field(2, ge=0, description="further tries where what the server gave is broken")
    max_consecutive_generation_failures: int = Field(20, ge=1, description="unusable samples in a row that end the run")


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


LOGGERS = ("tensorboard", "wandb", "trackio", "mlflow")
PLACEHOLDERS: dict[str, Callable[[], str]] = {
    "{time}": lambda: datetime.now().isoformat(timespec="seconds"),
    "{utc_time}": lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"),
    "{rank}": lambda: os.environ.get("RANK", "0"),
    "{local_rank}": lambda: os.environ.get("LOCAL_RANK", "0"),
}


def _by_comma(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


class LoggingSection(Section):
    logger: str = Field("", description="any of tensorboard, wandb, trackio, mlflow, by comma; metrics.jsonl is always written")
    log_dir: str = "./logs"
    run_name: str | None = Field(None, description="none: {time}; may hold {time}, {utc_time}, {rank} and {local_rank}")

    @field_validator("logger")
    @classmethod
    def _known_loggers(cls, value: str) -> str:
        unknown = set(_by_comma(value)) - set(LOGGERS)
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))} is not supported; there are {', '.join(LOGGERS)}")
        return value

    @field_validator("run_name")
    @classmethod
    def _known_placeholders(cls, value: str | None) -> str | None:
        unknown = set(re.findall(r"\{[^{}]*\}", value or "")) - set(PLACEHOLDERS)
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))} stands for nothing; there are {', '.join(PLACEHOLDERS)}")
        return value

    @property
    def loggers(self) -> list[str]:
        """The names in `logger`, each once."""
        return list(dict.fromkeys(_by_comma(self.logger)))

    @property
    def name(self) -> str:
        """The run's name, its placeholders filled in now."""
        name = self.run_name or "{time}"
        for placeholder, value in PLACEHOLDERS.items():
            name = name.replace(placeholder, value())
        return name


class TrainSection(Section):
    """What speculators calls the training config."""

    speculator_type: str = Field("eagle3", description="eagle3; speculators' other algorithms are not trained here")
    dry_run: bool = Field(False, description="write the draft as training would begin with it into save_path, and end")
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

    @field_validator("speculator_type")
    @classmethod
    def _eagle3(cls, value: str) -> str:
        if value != "eagle3":
            known = f"{value} is another algorithm" if value in ALGORITHMS else f"{value!r} is not known"
            raise ValueError(f"{known}; this trainer trains eagle3 drafts only")
        return value


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


REQUEST_FIELDS = {
    "model": "set train.verifier.verifier_name_or_path",
    "messages": "set regenerate.prompts",
    "max_tokens": "set regenerate.max_new_tokens",
    "max_completion_tokens": "set regenerate.max_new_tokens",
    "temperature": "set regenerate.temperature",
    "top_p": "set regenerate.top_p",
    "n": "a prompt gets one answer",
    "stream": "an answer is read when it is whole",
}
"""Fields of a request that the run file decides elsewhere, and where."""


class RegenerateSection(Section):
    prompts: list[str] = Field([], description="files of prompts (any form that prepare reads)")
    output: str = "./output/chats.jsonl"
    max_new_tokens: int = Field(256, ge=1)
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    batch_size: int = Field(32, ge=1, description="prompts answered together in this process")
    endpoint: str | None = Field(
        None, description="OpenAI-compatible server of the verifier, such as http://127.0.0.1:8000; none: this process"
    )
    concurrency: int = Field(64, ge=1, description="requests in flight")
    request_timeout: float = Field(600, gt=0, description="seconds to wait for one answer")
    max_retries: int = Field(3, ge=0, description="tries after the first")
    sampling_params: dict[str, Any] = Field({}, description="further fields of every request, such as {top_k: 20}")

    @field_validator("sampling_params")
    @classmethod
    def _sent_as_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in REQUEST_FIELDS:
                raise ValueError(f"{name} cannot be among them: {REQUEST_FIELDS[name]}")
        try:
            return dict(json.loads(json.dumps(value, allow_nan=False)))
        except TypeError as error:
            raise ValueError(f"cannot be sent as JSON: {error}") from None

    @model_validator(mode="after")
    def _sent_to_a_server(self) -> RegenerateSection:
        if self.sampling_params and self.endpoint is None:
            raise ValueError("sampling_params are those of a server: set regenerate.endpoint")
        return self


class ExtractSection(Section):
    hidden_states_path: str | None = Field(None, description="none: <data_path>/hidden_states")
    backend: Literal["transformers", "vllm"] = Field(
        "transformers", description="who runs the verifier: this process, or the server at train.generation.vllm_endpoint"
    )
    concurrency: int = Field(16, ge=1, description="requests in flight to that server, of `train` too")
    exchange_path: str | None = Field(
        None, description="folder through which that server hands over states; none: <hidden_states_path>/exchange"
    )
    batch_tokens: int = Field(4096, ge=1, description="tokens of one verifier forward, padding included")
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    minimum_agreement: float = Field(
        0.98, ge=0, le=1, description="share of positions at which stored states must give the verifier's own argmax"
    )


class OpsSection(Section):
    impl: Literal["auto", "flash", "fused", "reference"] = "auto"
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
    verifier_norm: bool | None = Field(
        None, description="pass stored last states through the verifier's final norm; none: as compat and data_format_version say"
    )
    data_format_version: int = Field(
        1, ge=0, le=1, description="of .pt samples: 1, last states before the verifier's final norm; 0, `target` after it"
    )
    noise_std: float | None = Field(
        None,
        ge=0,
        description="noise on hidden states while training, half its width or its standard deviation; none: as compat says",
    )
    noise_kind: Literal["uniform", "gaussian"] = "uniform"
    noise_tensors: list[Literal["hidden_states", "verifier_last_hidden_states"]] | None = Field(
        None, min_length=1, description="aux states, last states or both; none: as compat says"
    )
    accumulation: int = Field(1, ge=1, description="packed batches of one optimizer step on each rank")
    max_grad_norm: float = Field(1.0, gt=0)
    divisor: Literal["step", "batch"] = Field(
        "step", description="supervised tokens of the whole optimizer step, or of each packed batch (speculators)"
    )
    recompute: bool = Field(
        False,
        description="run the feed-forward half of every TTT step again in the backward pass: keeps a quarter of the activations",
    )
    keep_last: int | None = Field(None, ge=1, description="checkpoints to keep beside the best one; none: all")
    profile_steps: tuple[int, int] | None = Field(
        None, description="first and last optimizer step of a torch profiler trace, written to <save_path>/profile"
    )
    on_nan: Literal["stop", "skip"] = Field("stop", description="a step whose loss or gradient is not finite")
    deterministic: bool = Field(True, description="bit-exact kernels where torch has a choice")

    @field_validator("compat", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, float) else value  # YAML reads an unquoted 0.3 as a number


class DeepSpeedSection(Section):
    """How several processes share a run; read only where a launcher started them."""

    stage: Literal[0, 1, 2, 3] = Field(
        3, description="ZeRO: what is split over the ranks; 1 optimizer, 2 gradients too, 3 weights too"
    )
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
    format: Literal["speculators", "sglang"] = Field(
        "speculators", description="speculators: vLLM, `evaluate`; sglang: SGLang and SafeAILab"
    )
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

    @property
    def exchange_path(self) -> Path:
        return Path(self.extract.exchange_path or self.hidden_states_path / "exchange")


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


def load_run_config(path: str | Path | None, overrides: list[str] | None = None, flags: dict[str, Any] | None = None) -> RunConfig:
    """The run that a file (none: an empty one), `section.key=value` overrides and `train`'s flags (by dotted key) describe.

    Any fault is an `InputError` naming file, key and remedy. What a spelling of speculators was taken for is logged once.
    """
    source = str(path or "command line")
    values = _taken(_leaves("", _document(path)), source)
    for override in overrides or []:
        values |= _taken(_leaves(*_parsed(override)), f"override {override!r}")
    values |= _taken((flags or {}).items(), "command line")
    try:
        return RunConfig.model_validate(_nested(values))
    except ValidationError as error:
        raise InputError(f"{source}: " + "; ".join(_explain(item) for item in error.errors())) from None


def _document(path: str | Path | None) -> dict[str, Any]:
    """A run file with its `train:`; groups of a file without one are put under it, as speculators reads them."""
    document = {} if path is None else _read(path)
    if "train" in document:
        return document
    beside = {name: value for name, value in document.items() if name in RunConfig.model_fields}
    return {"train": {name: value for name, value in document.items() if name not in beside}, **beside}


def _read(path: str | Path) -> dict[str, Any]:
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
    return document


def _parsed(override: str) -> tuple[str, Any]:
    key, separator, value = override.partition("=")
    if not separator:
        raise InputError(f"override {override!r} is not of the form section.key=value")
    try:
        return key, yaml.safe_load(value) if value else ""
    except yaml.YAMLError as error:
        raise InputError(f"override {override!r}: its value is not valid YAML: {' '.join(str(error).split())}") from None


def _taken(leaves: Iterable[tuple[str, Any]], source: str) -> dict[str, Any]:
    """The values of one source by our own dotted keys; says what became of the others."""
    values, lines = canonical(leaves, source)
    for line in lines:
        say_once(line)
    return values


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Values by dotted key: what lies in a section, however it is nested; an empty section has none."""
    if path and path not in SECTIONS:
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{path}.{name}" if path else str(name), inner)
    elif value is not None:
        yield path, value


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Values by dotted key as a document. `train.verifier` is always there: it holds the one key that a run cannot do without."""
    document: dict[str, Any] = {"train": {"verifier": {}}}
    for key, value in values.items():
        _put(document, key, value)
    return document


def run_file(config: RunConfig, whole: bool = False) -> str:
    """The YAML that reads back to `config`, here and in speculators.

    It holds what differs from our defaults, and from speculators' defaults where they are others. whole: all of `train:`. What another
    source of the draft's config excludes is left out.
    """
    document = config.model_dump(mode="json", exclude_defaults=True)
    everything = config.model_dump(mode="json", include={"train"})
    if whole:
        document["train"] = everything["train"]
    for key in KEYS:
        if key.place == "own" and _at(everything, key.path) != key.effective:
            _put(document, key.path, _at(everything, key.path))
    draft = config.train.draft
    excluded = (*SHAPING_KEYS, *NORM_KEYS) if draft.from_pretrained else SHAPING_KEYS if draft.draft_config else ()
    for name in excluded:
        document["train"].get("draft", {}).pop(name, None)
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True)


def _at(document: dict[str, Any], key: str) -> Any:
    value: Any = document
    for name in key.split("."):
        value = value[name]
    return value


def _put(document: dict[str, Any], key: str, value: Any) -> None:
    """Set the value of a dotted key; sections that are not there yet are made."""
    *groups, leaf = key.split(".")
    for group in groups:
        document = document.setdefault(group, {})
        if not isinstance(document, dict):
            raise InputError(f"{key}: {group} is not a section")
    document[leaf] = value


def _explain(item: Any) -> str:
    """One pydantic error as `where: what`, with the nearest known key for an unknown one."""
    where = ".".join(str(part) for part in item["loc"]) or "run file"
    if item["type"] == "extra_forbidden":
        if where in SECTIONS:  # a group that only speculators has: all but its unknown keys were taken out
            where = ".".join((where, *list(item["input"])[:1]))
        return f"unknown key {where}{_nearest(where, [*known_keys(), *(key.path for key in KEYS)])}"
    if item["type"] == "missing":
        return f"{where} is required (flag --{str(item['loc'][-1]).replace('_', '-')})"
    return f"{where}: {item['msg'].removeprefix('Value error, ')}"


def _nearest(name: str, known: Iterable[str]) -> str:
    """The known key whose last part is most like that of `name`; of several, the one in the most alike section."""
    section, _, leaf = name.rpartition(".")
    keys = sorted(known, key=lambda key: SequenceMatcher(None, key.rpartition(".")[0], section).ratio())
    leaves = {key.rpartition(".")[2]: key for key in keys}
    match = get_close_matches(leaf, leaves, n=1, cutoff=0.5)
    return f"; did you mean {leaves[match[0]]}?" if match else ""


def known_keys() -> list[str]:
    """Every key of the run file in dotted form."""
    return list(descriptions())


def descriptions(section: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, str]:
    """What every key of the run file is, by dotted key; empty where its name says it."""
    texts = {}
    for name, info in section.model_fields.items():
        texts[prefix + name] = info.description or ""
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            texts |= descriptions(info.annotation, f"{prefix}{name}.")
    return texts


SECTIONS = {key.rpartition(".")[0] for key in known_keys()} | {f"train.{group}" for group in GROUPS}
"""Every section of the run file in dotted form, and speculators' groups that it lacks."""

"""One HTML file about a run: is the draft any good, how was it made, how is it served. Needs no network and no other file.

Everything shown is read from files that other verbs wrote (`gather`); what is not there yet is said to be missing, not guessed.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from eagle3_fast import __version__
from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.export.engines import serve_command
from eagle3_fast.files import read_json, written_aside
from eagle3_fast.model.config import DraftConfig, load_draft_config

TAU = "tokens per verifier pass, the verifier's own token included; 1 = no drafted token was accepted"
POINTS = 400
"""Points that a training curve is averaged down to; more cannot be told apart on the page."""

INK, FAINT = "#010203", "#010204"
"""Stand-ins that `_svg` turns into CSS variables, so that plots follow the page's light or dark colours."""
SERIES = ("#2f81c7", "#d9772b", "#2a9d74", "#a667c9", "#c9518a", "#8a8f2a", "#4bb0bd", "#b5533c")

LABEL_GAP = 0.075
"""Smallest distance of two line labels, as a share of the plot's height."""

Row = dict[str, Any]


@dataclass(frozen=True)
class ReportInputs:
    """What the report is made of, already read."""

    config: RunConfig
    metrics: list[Row] = field(default_factory=list)  # lines of metrics.jsonl
    evaluation: dict[str, Any] | None = None  # content of evaluation.json
    draft: DraftConfig | None = None  # config.json of the exported folder, or of the checkpoint behind one for SGLang
    prepared: dict[str, Any] = field(default_factory=dict)  # content of prepare.json
    vocabulary: dict[str, Any] = field(default_factory=dict)  # content of vocab-<D>.json
    agreement: float | None = None  # share of positions at which stored states give the verifier's own argmax
    seconds: dict[str, float] = field(default_factory=dict)  # wall time by verb


def report(config: RunConfig, seconds: dict[str, float] | None = None) -> Path:
    """Write report.html beside `evaluate.output` from what the run's other verbs left; `seconds` is wall time by verb."""
    return write_report(gather(config, seconds), Path(config.evaluate.output).with_name("report.html"))


def gather(config: RunConfig, seconds: dict[str, float] | None = None) -> ReportInputs:
    """Read the files of a run. Absent ones are left out; a malformed one is an InputError."""
    data, checkpoints = Path(config.train.data.data_path), Path(config.train.trainer.save_path)
    evaluation, metrics = Path(config.evaluate.output), checkpoints / "metrics.jsonl"
    draft = Path(config.export.output) if config.export.format == "speculators" else checkpoints / "checkpoint_best"
    return ReportInputs(
        config=config,
        metrics=read_metrics(metrics) if metrics.is_file() else [],
        evaluation=read_json(evaluation) if evaluation.is_file() else None,
        draft=load_draft_config(draft) if (draft / "config.json").is_file() else None,
        prepared=_json_or_nothing(data / "prepare.json"),
        vocabulary=_json_or_nothing(data / f"vocab-{config.train.draft.draft_vocab_size}.json"),
        agreement=_json_or_nothing(config.hidden_states_path / "extract.json").get("agreement"),
        seconds=seconds or {},
    )


def _json_or_nothing(path: Path) -> dict[str, Any]:
    return dict(read_json(path)) if path.is_file() else {}


def read_metrics(path: Path) -> list[Row]:
    """Lines of metrics.jsonl. A last line that a killed run left unfinished is ignored, any other is an InputError."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise InputError(f"{path}:{number}: not valid JSON ({error}); delete the line") from None
    return rows


def write_report(inputs: ReportInputs, path: Path) -> Path:
    """Write the report as one self-contained HTML file; returns `path`."""
    sets = (inputs.evaluation or {}).get("prompt_sets", [])
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"number": number, "speedup": speedup}
    html = environment.from_string(TEMPLATE).render(
        title=inputs.config.train.logging.run_name or Path(inputs.config.train.verifier.verifier_name_or_path).name,
        verifier=inputs.config.train.verifier.verifier_name_or_path,
        tau=TAU,
        evaluation=inputs.evaluation,
        sets=sets,
        different=[entry for entry in sets if entry.get("identical") not in (None, entry["prompts"])],
        loss=loss_plot(inputs.metrics, inputs.config.train.loss.loss_fn),
        acceptance=acceptance_plot(sets),
        speed=speed_plot(sets),
        facts=facts(inputs),
        serve=serve_commands(inputs),
    )
    with written_aside(path) as partial:
        partial.write_text(html, encoding="utf-8")
    return path


def number(value: float | None, digits: int = 0) -> str:
    """A number for a table: thousands apart, a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def speedup(entry: Row) -> float | None:
    """Speculative over plain decoding speed of a prompt set, None where either was not measured."""
    plain, speculative = entry.get("plain_tokens_per_s"), entry.get("speculative_tokens_per_s")
    return speculative / plain if plain and speculative else None


# --- facts -------------------------------------------------------------------------------------------------------------


def facts(inputs: ReportInputs) -> dict[str, dict[str, str]]:
    """Run facts by group; a group without facts is left out."""
    groups = {
        "Draft": _draft_facts(inputs),
        "Data": _data_facts(inputs),
        "Training": _training_facts(inputs),
        "Time": {verb: _duration(value) for verb, value in inputs.seconds.items()},
        "Versions": {"eagle3_fast": __version__, **{name: version(name) for name in ("torch", "transformers", "datasets")}},
    }
    return {name: group for name, group in groups.items() if group}


def _draft_facts(inputs: ReportInputs) -> dict[str, str]:
    if inputs.draft is None:
        return {}
    draft, layer = inputs.draft, inputs.draft.transformer_layer_config
    flags = [name for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if getattr(draft, name)]
    shape = f"{layer.num_hidden_layers} x {layer.model_type}, hidden {layer.hidden_size}, {layer.num_attention_heads} query and "
    found = {
        "Architecture": f"{shape}{layer.num_key_value_heads} key-value heads of {layer.head_dim}",
        "Reads verifier layers": ", ".join(map(str, draft.eagle_aux_hidden_state_layer_ids or ())) or "not stated",
        "Flags": ", ".join(flags) or "none",
        "Vocabulary": f"{number(draft.draft_vocab_size)} of {number(draft.verifier_vocab_size)} tokens",
    }
    if "coverage" in inputs.vocabulary:
        found["Vocabulary coverage"] = f"{100 * inputs.vocabulary['coverage']:.2f} % of the supervised tokens"
    return found


def _data_facts(inputs: ReportInputs) -> dict[str, str]:
    names = {"rows": "Rows", "tokens": "Tokens", "supervised_tokens": "Supervised tokens"}
    found = {title: number(inputs.prepared[key]) for key, title in names.items() if key in inputs.prepared}
    if dropped := inputs.prepared.get("dropped"):
        found["Rows left out"] = ", ".join(f"{number(count)} {reason}" for reason, count in dropped.items())
    if inputs.agreement is not None:
        found["Stored states agree with the verifier"] = f"{100 * inputs.agreement:.2f} % of positions"
    return found


def _training_facts(inputs: ReportInputs) -> dict[str, str]:
    train, optimizer = inputs.config.train, inputs.config.train.optimizer
    found = {
        "Loss": f"{train.loss.loss_fn}, {train.loss.ttt_steps} TTT steps, decay {train.loss.ttt_step_loss_decay:g}",
        "Optimizer": f"{optimizer.optimizer}, learning rate {optimizer.lr:g}, {train.scheduler.scheduler_type} schedule",
        "Semantics": f"speculators {inputs.config.engine.compat}",
    }
    steps = [row["global_step"] for row in inputs.metrics if "global_step" in row]
    rates = [row["tokens_per_s"] for row in inputs.metrics if row.get("tokens_per_s")]
    if steps:
        found["Optimizer steps"] = number(max(steps))
    if rates:
        found["Median speed"] = f"{number(sorted(rates)[len(rates) // 2])} tokens/s"
    taus = [row["tau"] for row in inputs.metrics if row.get("split") == "val" and "tau" in row]
    if taus:
        found["tau simulated on validation rows"] = f"{taus[-1]:.2f} at the end, {max(taus):.2f} at best"
    return found


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"


def serve_commands(inputs: ReportInputs) -> list[tuple[str, str]]:
    """(what for, command line) of the next steps."""
    folder, verifier = inputs.config.export.output, inputs.config.train.verifier.verifier_name_or_path
    tokens = (inputs.evaluation or {}).get("draft_tokens", inputs.config.evaluate.draft_tokens)
    if inputs.config.export.format == "sglang":
        return [("Serve verifier and draft", serve_command("sglang", folder, verifier, tokens))]
    option = json.dumps({"model": folder, "num_speculative_tokens": tokens, "method": "eagle3"})
    return [
        ("Check the folder before it is copied anywhere", f"eagle3-fast check {folder}"),
        (
            "Serve verifier and draft; vLLM finds the verifier in the draft's config.json",
            serve_command("speculators", folder, verifier, tokens),
        ),
        ("The same, naming the verifier yourself", f"vllm serve {verifier} --speculative-config '{option}'"),
    ]


# --- plots -------------------------------------------------------------------------------------------------------------


def loss_plot(metrics: Sequence[Row], loss_fn: str) -> Markup | None:
    """Loss of every TTT step against the optimizer step: training thin, validation as points."""
    names = sorted(
        {key for row in metrics for key in row if key.startswith("loss_") and key[5:].isdigit()}, key=lambda key: int(key[5:])
    )
    if not names:
        return None
    with _style():
        axes = _axes(9.6, 3.4)
        ends, values = [], []
        for index, name in enumerate(names):
            color = SERIES[index % len(SERIES)]
            steps, losses = thinned(*series(metrics, "train", name))
            axes.plot(steps, losses, color=color, linewidth=0.8, alpha=0.6)
            val_steps, val_losses = series(metrics, "val", name)
            axes.plot(val_steps, val_losses, color=color, linewidth=1.8, marker="o", markersize=4.5)
            tail = val_losses or losses
            values += losses + val_losses
            if tail:
                ends.append((tail[-1], f"step {name[5:]}", color))
        if values and min(values) > 0 and max(values) > 15 * min(values):
            axes.set_yscale("log")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(f"loss per supervised token ({loss_fn if loss_fn.isidentifier() else 'weighted sum'})")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _label_ends(axes, ends)
        return _svg(axes, "Loss of every TTT step over training")


def series(metrics: Sequence[Row], split: str, name: str) -> tuple[list[float], list[float]]:
    """Steps and finite values of one metric. Where a resumed run logged a step twice, the later value counts."""
    values = {
        row["global_step"]: row[name]
        for row in metrics
        if row.get("split") == split and isinstance(row.get(name), int | float) and math.isfinite(row[name])
    }
    return sorted(values), [values[step] for step in sorted(values)]


def thinned(steps: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """At most `POINTS` points, each the mean of as many neighbours."""
    size = -(-len(steps) // POINTS) or 1
    groups = [slice(start, start + size) for start in range(0, len(steps), size)]
    return [_mean(steps[group]) for group in groups], [_mean(values[group]) for group in groups]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def acceptance_plot(sets: Sequence[Row]) -> Markup | None:
    """alpha_k against k, one line for each prompt set."""
    if not any(value is not None for entry in sets for value in entry["alpha"]):
        return None
    with _style():
        axes = _axes(4.2, 3.2)
        ends = []
        for index, entry in enumerate(sets):
            points = [(k, value) for k, value in enumerate(entry["alpha"]) if value is not None]
            if points:
                color = SERIES[index % len(SERIES)]
                axes.plot(*zip(*points, strict=True), color=color, linewidth=1.8, marker="o", markersize=4.5)
                ends.append((points[-1][1], entry["name"], color))
        axes.set_ylim(0, 1)
        axes.set_xlabel("drafted position k")
        axes.set_ylabel("passes that accept drafts 0..k")
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _label_ends(axes, ends)
        return _svg(axes, "Acceptance of every drafted position")


def speed_plot(sets: Sequence[Row]) -> Markup | None:
    """Plain and speculative decoding speed of every prompt set, and their ratio."""
    timed = [entry for entry in sets if speedup(entry)]
    if not timed:
        return None
    with _style():
        axes = _axes(5.1, 0.8 + 0.6 * len(timed))
        longest = max(max(entry["plain_tokens_per_s"], entry["speculative_tokens_per_s"]) for entry in timed)
        for index, entry in enumerate(timed):
            plain, speculative = entry["plain_tokens_per_s"], entry["speculative_tokens_per_s"]
            axes.barh(index - 0.19, plain, 0.34, color=FAINT, alpha=0.45)
            axes.barh(index + 0.19, speculative, 0.34, color=SERIES[0])
            axes.text(plain + 0.01 * longest, index - 0.19, f"{plain:,.1f}  plain", va="center", color=INK)
            label = f"{speculative:,.1f}  speculative, {speedup(entry):.2f}x"
            axes.text(speculative + 0.01 * longest, index + 0.19, label, va="center", color=INK)
        axes.set_yticks(range(len(timed)), [entry["name"] for entry in timed])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.75 * longest)
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("generated tokens per second")
        return _svg(axes, "Decoding speed with and without the draft")


def _style() -> Any:
    return matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "eagle3_fast",
            "font.family": "sans-serif",
            "font.size": 9.5,
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": FAINT,
            "axes.linewidth": 0.8,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.color": FAINT,
            "grid.alpha": 0.3,
            "grid.linewidth": 0.6,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )


def _axes(width: float, height: float) -> Axes:
    """Axes in inches, with room on the right for labels at the ends of lines."""
    return Figure(figsize=(width, height), layout="constrained").subplots()


def _label_ends(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Name lines, (last value, name, colour) each, beside the right edge; moved apart where they would overlap."""
    axes.get_ylim()  # settles the limits that the transforms below use
    to_axes = axes.transScale + axes.transLimits
    places = [float(to_axes.transform((1, value))[1]) for value, _, _ in ends]
    order = sorted(range(len(ends)), key=places.__getitem__)
    for lower, upper in pairwise(order):
        places[upper] = max(places[upper], places[lower] + LABEL_GAP)
    for place, (_, name, color) in zip(places, ends, strict=True):
        axes.annotate(
            name,
            (1, place),
            (6, 0),
            "axes fraction",
            "offset points",
            color=color,
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )


def _svg(axes: Axes, title: str) -> Markup:
    """The figure as inline SVG whose neutral colours are the page's."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure), "axes without a figure"
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    return Markup(text.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)"))


TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>EAGLE-3 draft for {{ title }}</title>
<style>
:root { color-scheme: light dark;
  --ink: #1d2430; --faint: #6b7484; --page: #ffffff; --panel: #f5f6f8; --rule: #dde1e7; --warn: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ec; --faint: #8c95a4; --page: #14171c; --panel: #1d2129; --rule: #343a45; --warn: #ff8a80; }
}
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 62rem; color: var(--ink); background: var(--page);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.6rem 0 .6rem; }
h3 { font-size: .95rem; margin: 0 0 .3rem; }
p { margin: .4rem 0; }
.note { color: var(--faint); font-size: .88rem; max-width: 48rem; }
.warn { color: var(--warn); font-weight: 600; }
.cards { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.4rem 0 0; }
.card { background: var(--panel); border-radius: 8px; padding: .8rem 1.2rem; min-width: 10rem; }
.card b { display: block; font-size: 1.9rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.card span { color: var(--faint); font-size: .88rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { font-weight: 600; color: var(--faint); } th:first-child, td:first-child { text-align: left; padding-left: 0; }
.plots { display: flex; flex-wrap: wrap; gap: 1.5rem; margin-top: 1.6rem; }
figure { margin: 0; overflow-x: auto; } svg { max-width: 100%; height: auto; } .wide svg { min-width: 40rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1.6rem 2.5rem; }
dl { display: grid; grid-template-columns: minmax(9rem, max-content) 1fr; gap: .15rem 1rem; margin: 0; font-size: .92rem; }
dt { color: var(--faint); max-width: 12rem; } dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--panel); border-radius: 8px; padding: .7rem 1rem; margin: .3rem 0 1rem;
  overflow-x: auto; font-size: .88rem; }
@media print { body { max-width: none; } }
</style>
</head>
<body>
<h1>EAGLE-3 draft for {{ title }}</h1>
<p class="note">Verifier: {{ verifier }}</p>

{% if sets %}
<div class="cards">
{% for entry in sets %}
<div class="card"><span>{{ entry.name }}</span><b>&tau; {{ entry.tau | number(2) }}</b>
{% if entry | speedup %}<span>{{ entry | speedup | number(2) }}x plain speed</span>{% endif %}
</div>
{% endfor %}
</div>
<p class="note">&tau;: {{ tau }}.</p>
{% for entry in different %}
<p class="warn">{{ entry.name }}: {{ entry.prompts - entry.identical }} of {{ entry.prompts }} outputs
differ from plain greedy decoding.</p>
{% endfor %}

<h2>Acceptance and speed</h2>
<div class="scroll"><table>
<tr><th>prompts</th><th>same as plain</th><th>&tau;</th>
{% for k in range(evaluation.draft_tokens) %}<th>&alpha; {{ k }}</th>{% endfor %}
{% for k in range(evaluation.draft_tokens) if k %}<th>cond. {{ k }}</th>{% endfor %}
<th>plain tok/s</th><th>spec. tok/s</th><th>ratio</th></tr>
{% for entry in sets %}
<tr><td>{{ entry.name }}</td><td>{{ entry.identical | number }} of {{ entry.prompts | number }}</td>
<td>{{ entry.tau | number(2) }}</td>
{% for value in entry.alpha %}<td>{{ value | number(3) }}</td>{% endfor %}
{% for value in entry.conditional[1:] %}<td>{{ value | number(3) }}</td>{% endfor %}
<td>{{ entry.plain_tokens_per_s | number(1) }}</td><td>{{ entry.speculative_tokens_per_s | number(1) }}</td>
<td>{{ entry | speedup | number(2) }}</td></tr>
{% endfor %}
</table></div>
<p class="note">{{ evaluation.draft_tokens }} drafts before each verifier pass,
{% if evaluation.temperature == 0 %}greedy{% else %}temperature {{ evaluation.temperature }}{% endif %},
at most {{ evaluation.max_new_tokens }} new tokens, {{ evaluation.dtype }}.
&alpha; k: share of passes that accept all of drafts 0..k. cond. k: draft k accepted where all before it were;
cond. 0 is &alpha; 0.
Speed is of this package's own decoding loop, one prompt at a time; a server with its own kernels and batches differs.</p>
<div class="plots">
{% if acceptance %}<figure><h3>Acceptance by position</h3>{{ acceptance }}</figure>{% endif %}
{% if speed %}<figure><h3>Decoding speed</h3>{{ speed }}</figure>{% endif %}
</div>
{% else %}
<p class="warn">Not evaluated yet: acceptance and speed are unknown.</p>
{% endif %}

<h2>Training</h2>
{% if loss %}
<figure class="wide">{{ loss }}</figure>
<p class="note">Thin lines: training, averaged over neighbouring steps where there are many. Points: validation.
Step k of training-time test drafts from k of its own hidden states; its loss includes the step's decay.</p>
{% else %}
<p class="note">No metrics were found.</p>
{% endif %}

<h2>Facts of the run</h2>
<div class="facts">
{% for name, group in facts.items() %}
<section><h3>{{ name }}</h3><dl>
{% for key, value in group.items() %}
<dt>{{ key }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl></section>
{% endfor %}
</div>

<h2>Next steps</h2>
{% for purpose, command in serve %}
<p>{{ purpose }}:</p>
<pre>{{ command }}</pre>
{% endfor %}
</body>
</html>
"""

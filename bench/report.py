"""Tables and plots of `build/bench/*.json`: `python bench/report.py [FOLDER] [--no-plots]`. Needs matplotlib for the plots only."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from measure import RESULTS

Result = dict[str, Any]
AXES = {
    "vocab": "vocabulary",
    "rows": "rows",
    "ttt_steps": "TTT steps",
    "document": "document length",
    "supervised": "supervised share",
}


def tables(results: list[Result]) -> str:
    """Markdown: for each bench and machine one table, a row for each case and provider."""
    parts = []
    for (bench, machine), group in _grouped(results, lambda result: (result["bench"], _machine(result))).items():
        parts += [f"### {bench}: {machine}", "", *_table(group), ""]
    return "\n".join(parts)


def _machine(result: Result) -> str:
    environment = result["environment"]
    where = environment["gpu"] or f"{environment['cpu']} ({', '.join(environment['features'])}), {result['threads']} thread(s)"
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    return f"{where}, {result['dtype']}; {versions}; commit {environment['commit']}"


def _table(results: list[Result]) -> list[str]:
    lines = ["| case | provider | median ms | IQR ms | x ours | x GEMM | rows/s | peak MiB | gradient error | GFLOP/s |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for result in results:
        for name, values in result["providers"].items():
            rate = result["gemm_flops"] / values["median"] / 1e9 if name == "gemm" else None
            cells = [
                f"{1e3 * values['median']:.4g}",
                f"{1e3 * values['iqr']:.2g}",
                _number(values["times_ours"], ".2f"),
                _number(values["times_gemm"], ".2f"),
                f"{result['tokens'] / values['median']:.0f}",
                _number(values["peak_mib"], ".0f"),
                _number(values["error"], ".1e"),
                _number(rate, ".0f"),
            ]
            lines.append(f"| {result['case']} | {name} | {' | '.join(cells)} |")
        missing = [(name, f"not run: {reason}") for name, reason in result["unavailable"].items()]
        missing += [(name, f"failed: {fault}") for name, fault in result["failed"].items()]
        lines += [f"| {result['case']} | {name} | {what} |" + 7 * " |" for name, what in missing]
    return lines


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _grouped(results: list[Result], key: Any) -> dict[Any, list[Result]]:
    groups: dict[Any, list[Result]] = defaultdict(list)
    for result in results:
        groups[key(result)].append(result)
    return dict(groups)


def plots(results: list[Result], folder: Path) -> list[Path]:
    """Time and memory along every axis on which a bench has cases that differ in nothing else."""
    paths = []
    for axis in AXES:
        others = [name for name in (*AXES, "bench", "preset", "dtype", "threads", "device") if name != axis]
        for key, group in _grouped(results, lambda result, names=others: tuple(result[name] for name in names)).items():
            if len({result[axis] for result in group}) > 1:
                fixed = dict(zip(others, key, strict=True))
                paths.append(_plot(sorted(group, key=lambda result: result[axis]), axis, fixed, folder))
    return paths


def _plot(group: list[Result], axis: str, fixed: dict[str, Any], folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (time, memory) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for name in dict.fromkeys(name for result in group for name in result["providers"]):
        ran = [(result[axis], result["providers"][name]) for result in group if name in result["providers"]]
        at = [position for position, _ in ran]
        time.errorbar(
            at, [1e3 * values["median"] for _, values in ran], [5e2 * values["iqr"] for _, values in ran], fmt="o-", label=name
        )
        if name != "gemm":
            memory.plot(at, [values["peak_mib"] for _, values in ran], "o-", label=name)
    for plot, label in ((time, "ms"), (memory, "peak MiB above inputs")):
        plot.set(xlabel=AXES[axis], ylabel=label, xscale="log", yscale="log", xticks=sorted({result[axis] for result in group}))
        plot.xaxis.set_major_formatter("{x:g}")
        plot.minorticks_off()
    time.legend(fontsize="small")
    figure.suptitle(", ".join(str(fixed[name]) for name in ("bench", "preset", "dtype", "device", "threads")), fontsize="small")
    rest = "-".join(f"{name[0]}{fixed[name]:g}" for name in AXES if name != axis)
    path = folder / f"{fixed['bench']}-{fixed['preset']}-{fixed['device']}-{fixed['dtype']}-{fixed['threads']}-by-{axis}-{rest}.png"
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--no-plots", action="store_true")
    arguments = parser.parse_args()
    results = [result for path in sorted(arguments.folder.glob("*.json")) for result in json.loads(path.read_text())]
    print(tables(results))
    if not arguments.no_plots:
        for path in plots(results, arguments.folder):
            print(path)


if __name__ == "__main__":
    main()

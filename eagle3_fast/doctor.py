"""What this machine can train on: facts gathered by `examine`, judged by `diagnose`, printed by `doctor`.

Whatever may be broken (torch, Triton, extras, the card itself) is asked about in a child process with a time limit: an exception of
any kind, a crash or a hang there becomes a sentence here.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata, util
from itertools import dropwhile
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eagle3_fast.log import logger

CHILD_TIME_S = 180
"""A first import of torch from a cold network disk takes a minute; a card that hangs never answers."""

MINIMUM_TORCH = (2, 9)
MINIMUM_DRIVER = {11: 450, 12: 525, 13: 580}
"""Oldest driver by CUDA major version (NVIDIA, "CUDA Compatibility", minor version compatibility, table 1)."""
BLACKWELL, BLACKWELL_DRIVER = (10, 0), 570
"""Capability of the first Blackwell card; the driver that came with CUDA 12.8, the first CUDA to know them."""
OLDEST_CARD_OF_CUDA_13 = (7, 5)

DISTRIBUTIONS = {
    "transformers": "transformers.models.llama.modeling_llama",
    "triton": "triton",
    "flash-attn": "flash_attn",
    "liger-kernel": "liger_kernel.transformers",
    "deepspeed": "deepspeed",
    "C++ module": "eagle3_fast._C",
}
"""What is looked for beside torch, and the module whose import shows whether it works: the one that pulls in the compiled parts."""

OPTIONAL = ("flash-attn", "liger-kernel", "deepspeed")


@dataclass(frozen=True)
class Package:
    """An installed package; `broken` says why its import fails and is empty where it works."""

    version: str = ""
    broken: str = ""


@dataclass(frozen=True)
class Card:
    """One NVIDIA card. Shared memory a block (the most a kernel can ask for) is known to torch only."""

    name: str
    capability: tuple[int, int]
    memory_gib: float
    shared_memory_kib: float | None = None


@dataclass(frozen=True)
class Check:
    """Outcome of a computation on the machine's devices."""

    passed: bool
    detail: str
    crashed: bool = False  # it gave no numbers at all


@dataclass(frozen=True)
class Machine:
    """Everything `diagnose` judges."""

    python: str
    packages: dict[str, Package]  # "torch" and names of DISTRIBUTIONS; one that is absent is not in here
    torch_cuda: str | None  # the CUDA torch was built for; None for a CPU build
    torch_archs: tuple[str, ...]  # such as sm_120, compute_120
    cuda_error: str  # why torch cannot use CUDA; empty where it can
    driver: str | None
    driver_error: str  # what nvidia-smi complained about
    cards: tuple[Card, ...]
    ptxas: str
    ptxas_overridden: bool  # TRITON_PTXAS_PATH or its Blackwell sibling is set
    compiler: str | None
    cpu: tuple[str, ...]
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES
    peer_to_peer_disabled: bool
    dot: Check | None  # None: not run, no usable card or no Triton
    self_test: Check | None  # None: not run, no torch

    @property
    def usable_cards(self) -> tuple[Card, ...]:
        """The cards that torch can compute on."""
        return () if self.torch_cuda is None or self.cuda_error else self.cards


@dataclass(frozen=True)
class Problem:
    """`what` is wrong and the `fix`; training cannot run while one that `stops` it is there, the others are remarks."""

    what: str
    fix: str
    stops: bool = True


def doctor() -> bool:
    """Print what was found, the verdict and every problem; whether training can run."""
    logger.info("looking at this machine: some seconds for each package that is imported")
    machine = examine()
    problems = diagnose(machine)
    table = Table("", "found", title="eagle3-fast doctor")
    for name, found in facts(machine):
        table.add_row(name, Text(found, overflow="fold"))
    Console().print(table)
    print(verdict(machine, problems))
    for problem in problems:
        print(f"{'problem' if problem.stops else 'remark'}: {problem.what}. Fix: {problem.fix}")
    return not any(problem.stops for problem in problems)


def verdict(machine: Machine, problems: list[Problem]) -> str:
    """The one line that answers "can I train here?"."""
    stopping = sum(problem.stops for problem in problems)
    if stopping:
        return f"{stopping} problem{'s' * (stopping > 1)}: training cannot run as this machine is set up"
    cards = Counter(card.name for card in machine.usable_cards)
    where = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in cards.items())
    where = where or "the CPU (no NVIDIA card found)"
    remarks = f" ({len(problems)} remark{'s' * (len(problems) > 1)} below)" if problems else ""
    return f"ready: training runs on {where}{remarks}"


def facts(machine: Machine) -> Iterator[tuple[str, str]]:
    """Rows of the printed table."""
    built_for = f"CUDA {machine.torch_cuda}, {' '.join(machine.torch_archs)}" if machine.torch_cuda else "CPU build"
    yield "Python", machine.python
    yield "torch", _described(machine, "torch") + (f", {built_for}" if "torch" in machine.packages else "")
    yield "transformers", _described(machine, "transformers")
    yield "NVIDIA driver", machine.driver or machine.driver_error or "none found (no nvidia-smi)"
    if not machine.cards:
        yield "card", "none: CPU path"
    for index, card in enumerate(machine.cards):
        shared = f"{card.shared_memory_kib:.0f} KiB" if card.shared_memory_kib else "unknown"
        sm = f"sm_{card.capability[0]}{card.capability[1]}"
        covered = "covered by" if covers(machine.torch_archs, card.capability) else "NOT covered by"
        coverage = f", {covered} torch" if machine.torch_archs else ""
        yield f"card {index}", f"{card.name}, {sm}, {card.memory_gib:.1f} GiB, shared memory a block {shared}{coverage}"
    yield "Triton", _described(machine, "triton")
    yield "ptxas", machine.ptxas
    for name in OPTIONAL:
        yield name, _described(machine, name, "absent (optional)")
    yield "C++ compiler", machine.compiler or "none"
    yield "C++ module", _described(machine, "C++ module", "not built")
    yield "CPU", ", ".join(machine.cpu) or "none of AVX2, AVX-512, bfloat16, AMX"
    yield "Triton dot", _outcome(machine.dot, "not run: no usable card" if not machine.usable_cards else "not run: no Triton")
    yield "self-test", _outcome(machine.self_test, "not run: no torch")


def _described(machine: Machine, name: str, absent: str = "absent") -> str:
    package = machine.packages.get(name)
    if package is None:
        return absent
    return f"{package.version} does not import: {package.broken}".lstrip() if package.broken else package.version or "works"


def _outcome(check: Check | None, absent: str) -> str:
    if check is None:
        return absent
    return f"{'passed' if check.passed else 'FAILED'}: {check.detail}"


def covers(archs: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether code built for `archs` runs on a card: machine code within a major version upwards, PTX on everything later.

    An architecture with a suffix (sm_90a) runs on that one alone (CUDA C++ programming guide, "Compute capabilities").
    """
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch)
        if match is None:
            continue
        built = int(match[2]), int(match[3])
        if built == capability or (not match[4] and built < capability and (match[1] == "compute" or built[0] == capability[0])):
            return True
    return False


# Judgement: from facts alone, so that any machine can be imagined in a test.


def diagnose(machine: Machine) -> list[Problem]:
    """What stands in the way of training, causes first, then remarks. Pure."""
    problems = [*_torch_problems(machine), *_card_problems(machine), *_package_problems(machine)]
    # A check that fails for a reason named above is not a second problem.
    if not any(problem.stops for problem in problems):
        problems += _check_problems(machine)
    problems += _build_remarks(machine)
    return sorted(problems, key=lambda problem: not problem.stops)


def _torch_problems(machine: Machine) -> Iterator[Problem]:
    torch = machine.packages.get("torch")
    if torch is None:
        yield Problem("torch is not installed", _install_torch(machine))
    elif torch.broken:
        yield Problem(f"torch {torch.version} does not import: {torch.broken}", _install_torch(machine))
    elif machine.cards and machine.torch_cuda is None:
        yield Problem(f"torch {torch.version} is a CPU build and cannot use the {machine.cards[0].name}", _install_torch(machine))
    elif missing := _uncovered(machine):
        card, built = missing, " ".join(machine.torch_archs)
        sm = f"sm_{card.capability[0]}{card.capability[1]}"
        yield Problem(
            f"torch {torch.version} has no kernels for the {card.name} ({sm}); it was built for {built}", _install_torch(machine)
        )
    elif _numbers(torch.version)[:2] < MINIMUM_TORCH:
        yield Problem(f"torch {torch.version} is too old; {_dotted(MINIMUM_TORCH)} is needed", _install_torch(machine))


def _card_problems(machine: Machine) -> Iterator[Problem]:
    """Driver and card, where torch wants to use one."""
    driver = _numbers(machine.driver or "")[:1]
    card = max(machine.cards, key=lambda card: card.capability, default=None)
    needed = MINIMUM_DRIVER.get(_numbers(machine.torch_cuda)[0], 0) if machine.torch_cuda else 0
    if card and card.capability >= BLACKWELL and driver and driver[0] < BLACKWELL_DRIVER:
        yield Problem(f"driver {machine.driver} does not know the {card.name}", _update_driver(max(BLACKWELL_DRIVER, needed)))
    elif driver and driver[0] < needed:
        older = f"; or keep the driver and {_install_torch(machine)}" if driver[0] >= MINIMUM_DRIVER[12] else ""
        what = f"driver {machine.driver} is older than CUDA {machine.torch_cuda}, for which torch was built, allows"
        yield Problem(what, _update_driver(needed) + older)
    elif machine.torch_cuda and machine.driver_error and not machine.usable_cards:
        yield Problem(
            f"nvidia-smi fails: {machine.driver_error}", "reboot if the driver was updated since the last boot, else reinstall it"
        )
    elif machine.torch_cuda and machine.cards and machine.cuda_error:
        shown = "not set" if machine.visible_devices is None else repr(machine.visible_devices)
        yield Problem(
            f"torch cannot use the {machine.cards[0].name}: {machine.cuda_error}",
            f"look at CUDA_VISIBLE_DEVICES (now {shown}); after a driver update, reboot",
        )


def _package_problems(machine: Machine) -> Iterator[Problem]:
    transformers = machine.packages.get("transformers")
    upgrade = 'pip install --upgrade "transformers>=5.10.2"'
    if transformers is None:
        yield Problem("transformers is not installed", upgrade)
    # Without torch its import fails too, and an extra that is broken may be what breaks it: both are named on their own.
    elif transformers.broken and "torch" in machine.packages and not machine.packages["torch"].broken:
        extras = [name for name in OPTIONAL if name in machine.packages and machine.packages[name].broken]
        fix = f"pip uninstall {' '.join(extras)}, then, if that was not it, {upgrade}" if extras else upgrade
        yield Problem(f"transformers {transformers.version} does not import: {transformers.broken}", fix)
    for name in OPTIONAL:
        package = machine.packages.get(name)
        if package and package.broken:
            what = f"{name} {package.version}".rstrip() + f" is installed but does not import: {package.broken}"
            yield Problem(what, f"pip uninstall {name}; it is not needed", stops=False)


def _check_problems(machine: Machine) -> Iterator[Problem]:
    """Computations that failed. The self-test takes the default implementation, so it decides whether training can run."""
    trains = machine.self_test is not None and machine.self_test.passed
    if machine.usable_cards and (triton := machine.packages.get("triton", Package(broken="not installed"))).broken:
        yield Problem(f"Triton cannot be used: {triton.broken}", _install_torch(machine) + " (it brings its Triton)", not trains)
    if machine.dot and not machine.dot.passed:
        kind = "could not be compiled or run" if machine.dot.crashed else "gives wrong products"
        yield Problem(
            f"a Triton tl.dot kernel {kind}: {machine.dot.detail}; ptxas {machine.ptxas}",
            _kernel_fix(machine, machine.dot),
            stops=not machine.dot.crashed or not trains,
        )
    if machine.self_test and not machine.self_test.passed:
        what = f"linear_divergence fails its self-test: {machine.self_test.detail}"
        yield Problem(what, "EAGLE3_FAST_IMPL=reference eagle3-fast doctor; if that passes, train so, and report this table")


def _kernel_fix(machine: Machine, check: Check) -> str:
    if "Python.h" in check.detail:
        return "install the Python headers, which Triton compiles against: apt install python3-dev"
    if "C compiler" in check.detail:
        return "install a C compiler, which Triton needs: apt install gcc"
    if machine.ptxas_overridden:
        return "unset TRITON_PTXAS_PATH and TRITON_PTXAS_BLACKWELL_PATH, so that Triton takes the ptxas it came with"
    return _install_torch(machine) + " (it brings its Triton and ptxas); until then train with ops.impl=reference"


def _build_remarks(machine: Machine) -> Iterator[Problem]:
    module = machine.packages.get("C++ module")
    if module is None or module.broken:
        what = f"the C++ module does not import: {module.broken}" if module else "the C++ module (CPU kernels) is not built"
        compiler = "" if machine.compiler else "apt install g++; "
        build = "pip install --no-build-isolation --force-reinstall --no-deps . in the source folder"
        yield Problem(f"{what}; the CPU runs the PyTorch reference", compiler + build, stops=False)
    if len(machine.usable_cards) > 1 and not machine.peer_to_peer_disabled and any("RTX" in x.name for x in machine.usable_cards):
        yield Problem(
            f"{len(machine.usable_cards)} RTX cards, which have no NVLink: on some boards NCCL hangs at the first all-reduce",
            "only if the first step hangs, set NCCL_P2P_DISABLE=1; IOMMU and PCIe ACS off in the BIOS is the lasting cure",
            stops=False,
        )


def _uncovered(machine: Machine) -> Card | None:
    """The first card that torch has no code for; None where the architectures of torch are not known."""
    return next((card for card in machine.cards if machine.torch_archs and not covers(machine.torch_archs, card.capability)), None)


def _install_torch(machine: Machine) -> str:
    """Which build of torch to install. cu126 has no Blackwell code, cu130 nothing before Turing (pytorch RELEASE.md)."""
    driver = _numbers(machine.driver or "")[:1]
    if not machine.cards:
        build = "cpu"
    elif min(card.capability for card in machine.cards) < OLDEST_CARD_OF_CUDA_13:
        build = "cu126"
    # A driver older than Blackwell needs has to be replaced anyway; a new one runs CUDA 13.
    elif driver and BLACKWELL_DRIVER <= driver[0] < MINIMUM_DRIVER[13]:
        build = "cu128"
    elif driver and driver[0] < BLACKWELL_DRIVER and max(card.capability for card in machine.cards) < BLACKWELL:
        build = "cu126"
    else:
        build = "cu130"
    return f"reinstall torch {_dotted(MINIMUM_TORCH)} or later in its {build} build (PyTorch's install page gives the command)"


def _update_driver(needed: int) -> str:
    return f"update the NVIDIA driver to {needed} or later (Blackwell cards: with the open kernel modules) and reboot"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# Facts.


def examine() -> Machine:
    """Gather the facts of this machine; takes some seconds for each package that has to be imported."""
    with ThreadPoolExecutor(4) as pool:
        found = zip(DISTRIBUTIONS, pool.map(_package, DISTRIBUTIONS, DISTRIBUTIONS.values()), strict=True)
    packages = {name: package for name, package in found if package}
    torch: dict[str, Any] = {}
    if util.find_spec("torch") is not None:
        torch, failure = _ask(torch_facts)
        packages["torch"] = Package(_version("torch"), failure)
    listed, cuda_error = _ask(torch_cards) if torch.get("cuda") else ({}, "")
    cards = tuple(Card(name, (major, minor), *sizes) for name, major, minor, *sizes in listed.get("cards", ()))
    devices = [f"cuda:{index}" for index in range(len(cards))]
    driver, driver_error = _nvidia_smi("driver_version")
    return Machine(
        python=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        packages=packages,
        torch_cuda=torch.get("cuda"),
        torch_archs=tuple(torch.get("archs", ())),
        cuda_error=cuda_error,
        driver=driver[0] if driver else None,
        driver_error=driver_error,
        cards=cards or _cards_without_torch(),
        ptxas=_ptxas(cards) if _works(packages, "triton") else "unknown: no Triton",
        ptxas_overridden=any(name.startswith("TRITON_PTXAS") and name.endswith("_PATH") for name in os.environ),
        compiler=_compiler(),
        cpu=tuple(torch.get("cpu", ())),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        peer_to_peer_disabled=os.environ.get("NCCL_P2P_DISABLE") == "1",
        dot=_check(compare_dot, devices) if devices and _works(packages, "triton") else None,
        self_test=_check(compare_divergence, devices or ["cpu"]) if _works(packages, "torch") else None,
    )


def _works(packages: dict[str, Package], name: str) -> bool:
    return name in packages and not packages[name].broken


def _package(name: str, module: str) -> Package | None:
    # Only the top-level name is looked up here: finding a submodule imports its parents.
    if util.find_spec(module.partition(".")[0]) is None or (name == "C++ module" and util.find_spec(module) is None):
        return None
    # The C++ module finds the libraries it is linked to through torch.
    _, failure = _ask(imports, *(["torch"] if name == "C++ module" else []), module)
    return Package(_version(name), failure)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # our own C++ module, or a folder that someone put on the path
        return ""


def _nvidia_smi(fields: str) -> tuple[list[str], str]:
    """One line for each card, or what nvidia-smi complained about; neither where there is no nvidia-smi."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return [], ""
    try:
        done = subprocess.run(
            [command, f"--query-gpu={fields}", "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return [], " ".join((done.stdout + done.stderr).split()) or f"exit code {done.returncode}"
    return lines, ""


def _cards_without_torch() -> tuple[Card, ...]:
    """The cards as nvidia-smi lists them, for a torch that cannot: CPU build, driver too old."""
    cards = []
    for line in _nvidia_smi("name,compute_cap,memory.total")[0]:
        name, capability, memory = (part.strip() for part in line.rsplit(",", 2))
        major, minor = (*_numbers(capability), 0, 0)[:2]
        cards.append(Card(name, (major, minor), sum(_numbers(memory)[:1]) / 1024))  # MiB; [N/A] where the card shares the CPU's
    return tuple(cards)


def _ptxas(cards: tuple[Card, ...]) -> str:
    """Version and path of the assembler that Triton takes for the first card; for a Blackwell card where there is none."""
    major, minor = cards[0].capability if cards else (12, 0)
    tool, failure = _ask(ptxas, major * 10 + minor)
    return f"unknown: {failure}" if failure else f"{tool['version']}, {tool['path']}"


def _compiler() -> str | None:
    path = shutil.which(os.environ.get("CXX", "c++"))
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, text=True)
    return f"{path}: {next(iter(done.stdout.splitlines()), 'says nothing')}"


def _check(question: Callable[..., dict[str, Any]], devices: list[str]) -> Check:
    worst, failure = _ask(question, devices)
    if failure:
        return Check(False, failure, crashed=True)
    sizes = f"error {worst['error']:.2g}, allowed {worst['allowed']:.2g}"
    return Check(worst["error"] <= worst["allowed"], f"{worst['what']} on {worst['device']}: {sizes}")


def _ask(question: Callable[..., dict[str, Any]], *arguments: Any) -> tuple[dict[str, Any], str]:
    """What a function of this file answers in a child process, and in one line why there is no answer."""
    call = f"print(json.dumps(doctor.{question.__name__}(*json.loads({json.dumps(arguments)!r}))))"
    code = f"import sys; sys.path[:] = {sys.path!r}\nimport json\nfrom eagle3_fast import doctor\n{call}"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, errors="replace", timeout=CHILD_TIME_S)
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {CHILD_TIME_S} s"
    if done.returncode < 0:
        return {}, f"crashed with {signal.Signals(-done.returncode).name}"
    if done.returncode or not done.stdout.strip():
        return {}, _reason(done.stderr) or f"ended with exit code {done.returncode}"
    return json.loads(done.stdout.splitlines()[-1]), ""


def _reason(stderr: str) -> str:
    """The exception of the last traceback with all lines of its message, cut to a readable length; without one, the last line."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    frame = max((index for index, line in enumerate(lines) if line.startswith('  File "')), default=None)
    after = lines[-1:] if frame is None else list(dropwhile(lambda line: line.startswith(" "), lines[frame:]))
    return " ".join(" ".join(after).split())[:300]


# Questions, answered in a child process.


def imports(*modules: str) -> dict[str, Any]:
    """Import the modules in order."""
    for module in modules:
        __import__(module)
    return {}


def torch_facts() -> dict[str, Any]:
    """What torch knows without touching a card. An old torch, which is to be named as such, must not fail here."""
    import torch

    features = {"AVX2": "avx2", "AVX-512": "avx512", "AVX-512 bfloat16": "avx512_bf16", "AMX": "amx_tile"}
    supported = {name: getattr(torch.cpu, f"_is_{query}_supported", bool) for name, query in features.items()}
    # torch.cuda.get_arch_list of older versions is empty where CUDA cannot start, which is when it is wanted most.
    archs = torch._C._cuda_getArchFlags() if torch.version.cuda else None
    return {
        "cpu": [name for name, answer in supported.items() if answer()],
        "cuda": torch.version.cuda,
        "archs": archs.split() if archs else [],
    }


def torch_cards() -> dict[str, Any]:
    """The fields of `Card` for each card; fails with the reason where torch cannot use CUDA."""
    import torch

    torch.cuda.init()
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    sizes = [(card.total_memory / 2**30, getattr(card, "shared_memory_per_block_optin", 0) / 2**10) for card in cards]
    return {"cards": [(card.name, card.major, card.minor, *size) for card, size in zip(cards, sizes, strict=True)]}


def ptxas(arch: int) -> dict[str, Any]:
    """The assembler that Triton takes for `arch` (120 for sm_120)."""
    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(arch)
    return {"path": tool.path, "version": tool.version}


def compare_dot(devices: list[str], dtype: str = "bfloat16") -> dict[str, Any]:
    """A 64 x 64 x 64 `tl.dot` against float64, on the device where it is worst.

    Allowed: twice the error of torch's float32 product, and four float32 roundings of the largest sum of magnitudes, which bounds
    what any order of adding can lose. A product at lower precision misses that by orders of magnitude.
    """
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def dot(a, b, out):
        index = tl.arange(0, 64)
        tile = index[:, None] * 64 + index[None, :]
        tl.store(out + tile, tl.dot(tl.load(a + tile), tl.load(b + tile)))

    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=draw).to(getattr(torch, dtype)) for _ in range(2))
    exact = a.double() @ b.double()
    slack = 4 * torch.finfo(torch.float32).eps * (a.double().abs() @ b.double().abs()).max()
    outcomes = []
    for device in devices:
        x, y = a.to(device), b.to(device)
        product = torch.empty(64, 64, device=device)
        with torch.cuda.device_of(x):
            dot[(1,)](x, y, product)
        error, eager = ((z.double().cpu() - exact).abs().max() for z in (product, x.float() @ y.float()))
        outcomes.append(_outcome_on(device, f"64 x 64 x 64, {dtype}", error, 2 * eager + slack))
    return max(outcomes, key=_badness)


def compare_divergence(devices: list[str]) -> dict[str, Any]:
    """`linear_divergence` with its gradients against the float64 reference, with frozen heads and with a trained one, as training
    would run it; the worst of all devices.

    The error budget is that of CONTRIBUTING.md, for the loss and both gradients; its eps is that of the inputs' dtype, in which the
    fused kernels also keep logits.
    """
    import torch

    from eagle3_fast.ops import linear_divergence
    from eagle3_fast.ops._dispatch import resolve
    from eagle3_fast.precision import arithmetic_dtype
    from eagle3_fast.reference.linear_divergence import linear_divergence as reference
    from eagle3_fast.testing.cases import LinearDivergenceCase

    def by_reference(**inputs: Any) -> Any:
        return reference(**inputs, kinds=["kl_div"], kind_weights=[1.0])[0]

    def by_op(**inputs: Any) -> Any:
        return linear_divergence(**inputs, kinds={"kl_div": 1.0}).loss

    case, outcomes = LinearDivergenceCase("self-test", 64, 64, 257, hidden=64, verifier_hidden=64), []
    for device in devices:
        dtype = arithmetic_dtype(torch.bfloat16, torch.device(device).type)
        inputs, taken = case.inputs(dtype), resolve("linear_divergence", torch.device(device).type, dtype)
        wide = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
        for trained, parts in (
            (["h_MH"], ("loss", "gradient in h")),
            (["h_MH", "w_VH"], ("loss", "gradient in h", "gradient in the head")),
        ):
            exact = _loss_and_gradients(by_reference, wide, trained, "cpu")
            eager, actual = (_loss_and_gradients(run, inputs, trained, device) for run in (by_reference, by_op))
            for part, x, y, z in zip(parts, actual, exact, eager, strict=True):
                allowed = 2 * (z.double() - y).abs().max() + 4 * torch.finfo(dtype).eps * y.abs().max()
                what = f"linear_divergence ({taken}) 64 x 64 x 257, {str(dtype).removeprefix('torch.')}, {part}"
                outcomes.append(_outcome_on(device, what, (x.double() - y).abs().max(), allowed))
    return max(outcomes, key=_badness)


def _loss_and_gradients(run: Callable[..., Any], inputs: dict[str, Any], trained: list[str], device: str) -> list[Any]:
    """Loss and its gradients in what is trained, computed on `device`, returned on the CPU. The other heads are frozen parameters."""
    import torch

    placed = {name: x.detach().to(device) for name, x in inputs.items()}
    placed |= {name: torch.nn.Parameter(placed[name], requires_grad=False) for name in ("w_VH", "u_VG")}
    leaves = [placed[name].requires_grad_() for name in trained]
    loss = run(**placed)
    return [x.cpu() for x in (loss.detach(), *torch.autograd.grad(loss, leaves))]


def _outcome_on(device: str, what: str, error: Any, allowed: Any) -> dict[str, Any]:
    return {"device": device, "what": what, "error": float(error), "allowed": float(allowed)}


def _badness(outcome: dict[str, Any]) -> float:
    share = outcome["error"] / outcome["allowed"]
    return share if share == share else float("inf")

"""`doctor`: imagined machines are judged as a person would, broken packages are survived, this machine is examined."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3_fast import cli, doctor
from eagle3_fast.doctor import Card, Check, Machine, Package, diagnose, facts, verdict

WORKING = {"torch": Package("2.9.1"), "transformers": Package("5.24.0"), "triton": Package("3.5.1"), "C++ module": Package()}
CU128 = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
CU121 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
PRO_6000 = Card("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 95.6, 99.0)
PASSED = Check(True, "error 1e-07, allowed 3e-07")
NO_IMAGE = Check(False, "RuntimeError: CUDA error: no kernel image is available for execution on the device", crashed=True)

LAPTOP = Machine(
    python="3.12.3 on Linux x86_64",
    packages=WORKING,
    torch_cuda=None,
    torch_archs=(),
    cuda_error="",
    driver=None,
    driver_error="",
    cards=(),
    ptxas="12.8, /venv/triton/ptxas",
    ptxas_overridden=False,
    compiler="/usr/bin/c++: c++ 13.2.0",
    cpu=("AVX2",),
    visible_devices=None,
    peer_to_peer_disabled=False,
    dot=None,
    self_test=PASSED,
)
WORKSTATION = replace(LAPTOP, torch_cuda="12.8", torch_archs=CU128, driver="575.57.08", cards=(PRO_6000,), dot=PASSED)
OLD_TORCH = replace(
    WORKSTATION,
    packages={**WORKING, "torch": Package("2.5.1+cu121")},
    torch_cuda="12.1",
    torch_archs=CU121,
    dot=NO_IMAGE,
    self_test=NO_IMAGE,
)
OLD_DRIVER = replace(
    WORKSTATION,
    packages={
        **WORKING,
        "flash-attn": Package("2.8.3", "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEa"),
    },
    torch_cuda="13.0",
    cuda_error="RuntimeError: The NVIDIA driver on your system is too old (found version 12090)",
    dot=None,
)


def table(machine: Machine) -> dict[str, str]:
    return dict(facts(machine))


def test_laptop_without_a_card_is_ready() -> None:
    assert diagnose(LAPTOP) == []
    assert verdict(LAPTOP, []) == "ready: training runs on the CPU (no NVIDIA card found)"
    assert table(LAPTOP)["card"] == "none: CPU path"
    assert table(LAPTOP)["flash-attn"] == "absent (optional)"


def test_torch_for_cuda_without_a_card_is_ready() -> None:
    """What `pip install torch` gives on any Linux machine."""
    machine = replace(
        LAPTOP, torch_cuda="13.0", torch_archs=CU128, cuda_error="RuntimeError: Found no NVIDIA driver on your system."
    )
    assert diagnose(machine) == []


def test_workstation_is_ready() -> None:
    assert diagnose(WORKSTATION) == []
    assert verdict(WORKSTATION, []) == f"ready: training runs on {PRO_6000.name}"
    assert table(WORKSTATION)["card 0"] == f"{PRO_6000.name}, sm_120, 95.6 GiB, shared memory a block 99 KiB, covered by torch"


def test_torch_without_sm_120_is_one_problem() -> None:
    (problem,) = diagnose(OLD_TORCH)
    assert problem.stops
    assert "2.5.1+cu121 has no kernels for the NVIDIA RTX PRO 6000" in problem.what
    assert problem.fix == "reinstall torch 2.9 or later in its cu128 build (PyTorch's install page gives the command)"
    assert verdict(OLD_TORCH, [problem]) == "1 problem: training cannot run as this machine is set up"
    assert "NOT covered by torch" in table(OLD_TORCH)["card 0"]
    (newer,) = diagnose(replace(OLD_TORCH, driver="580.95.05"))
    assert "its cu130 build" in newer.fix


def test_old_driver_stops_and_broken_flash_attn_does_not() -> None:
    driver, flash = diagnose(OLD_DRIVER)
    assert driver.stops
    assert "driver 575.57.08 is older than CUDA 13.0" in driver.what
    assert "update the NVIDIA driver to 580 or later" in driver.fix
    assert driver.fix.endswith("or keep the driver and " + diagnose(OLD_TORCH)[0].fix)
    assert not flash.stops
    assert "undefined symbol" in flash.what
    assert flash.fix == "pip uninstall flash-attn; it is not needed"
    assert verdict(OLD_DRIVER, [driver, flash]).startswith("1 problem:")


def test_driver_from_before_the_card() -> None:
    (problem,) = diagnose(replace(WORKSTATION, driver="550.163.01", cuda_error="RuntimeError: no CUDA-capable device"))
    assert "driver 550.163.01 does not know the NVIDIA RTX PRO 6000" in problem.what
    assert "570 or later" in problem.fix


def test_driver_of_the_same_cuda_major_version_is_enough() -> None:
    hopper = Card("NVIDIA H100 80GB HBM3", (9, 0), 79.1, 227.0)
    assert diagnose(replace(WORKSTATION, cards=(hopper,), driver="535.104.05")) == []


def test_cpu_build_beside_a_card() -> None:
    (problem,) = diagnose(replace(WORKSTATION, torch_cuda=None, torch_archs=(), dot=None))
    assert "CPU build" in problem.what
    assert "its cu128 build" in problem.fix


def test_hidden_card() -> None:
    machine = replace(WORKSTATION, visible_devices="", cuda_error="RuntimeError: No CUDA GPUs are available", dot=None)
    (problem,) = diagnose(machine)
    assert "No CUDA GPUs" in problem.what
    assert "CUDA_VISIBLE_DEVICES (now '')" in problem.fix


def test_driver_that_does_not_answer() -> None:
    error = "Failed to initialize NVML: Driver/library version mismatch"
    (problem,) = diagnose(replace(WORKSTATION, driver=None, driver_error=error, cards=(), cuda_error="RuntimeError: x", dot=None))
    assert error in problem.what
    assert "reboot" in problem.fix


def test_several_cards_get_the_peer_to_peer_hint_once() -> None:
    machine = replace(WORKSTATION, cards=(PRO_6000, PRO_6000))
    (remark,) = diagnose(machine)
    assert not remark.stops
    assert "NCCL_P2P_DISABLE=1" in remark.fix
    assert verdict(machine, [remark]) == f"ready: training runs on 2 x {PRO_6000.name} (1 remark below)"
    assert diagnose(replace(machine, peer_to_peer_disabled=True)) == []


def test_wrong_products_stop_and_a_kernel_that_does_not_compile_stops_where_the_ops_need_it() -> None:
    wrong = Check(False, "error 0.02, allowed 4e-05")
    refused = Check(
        False, "PTXASError: PTXAS error: ptxas fatal: Value 'sm_120a' is not defined for option 'gpu-name'", crashed=True
    )
    assert [problem.stops for problem in diagnose(replace(WORKSTATION, dot=wrong))] == [True]
    (problem,) = diagnose(replace(WORKSTATION, dot=refused))
    assert not problem.stops
    assert WORKSTATION.ptxas in problem.what
    assert [x.stops for x in diagnose(replace(WORKSTATION, dot=refused, self_test=refused))] == [True, True]
    (overridden,) = diagnose(replace(WORKSTATION, dot=refused, ptxas_overridden=True))
    assert "unset TRITON_PTXAS_PATH" in overridden.fix
    (headers,) = diagnose(replace(WORKSTATION, dot=Check(False, "fatal error: Python.h: No such file", crashed=True)))
    assert "python3-dev" in headers.fix


def test_missing_parts() -> None:
    def without(name: str) -> list[doctor.Problem]:
        packages = {key: value for key, value in WORKING.items() if key != name}
        return diagnose(replace(LAPTOP, packages=packages, compiler=None))

    assert [problem.what for problem in without("torch")] == ["torch is not installed"]
    assert [problem.stops for problem in without("transformers")] == [True]
    assert without("triton") == []
    (module,) = without("C++ module")
    assert not module.stops
    assert module.fix.startswith("apt install g++; pip install --no-build-isolation")


def test_broken_extra_that_breaks_transformers() -> None:
    broken = Package("1", "RuntimeError: no")
    stop, remark = diagnose(replace(LAPTOP, packages={**WORKING, "transformers": broken, "flash-attn": broken}))
    assert stop.stops
    assert stop.fix.startswith("pip uninstall flash-attn, then")
    assert not remark.stops


@pytest.mark.parametrize(
    ("archs", "capability", "covered"),
    [
        ("sm_120", (12, 1), True),
        ("sm_120", (12, 0), True),
        ("sm_120a", (12, 1), False),
        ("sm_120a", (12, 0), True),
        ("sm_90a compute_90", (12, 0), True),
        ("sm_90 compute_90a", (12, 0), False),
        ("sm_86", (8, 9), True),
        ("sm_89", (8, 6), False),
        ("sm_100", (12, 0), False),
    ],
)
def test_covers(archs: str, capability: tuple[int, int], covered: bool) -> None:
    assert doctor.covers(tuple(archs.split()), capability) is covered


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import torch_of_another_abi", "ModuleNotFoundError: No module named 'torch_of_another_abi'"),
        ("raise OSError('libcudart.so.11.0: cannot open')", "OSError: libcudart.so.11.0: cannot open"),
        ("raise RuntimeError('no kernel\\nimage')", "RuntimeError: no kernel image"),
        ("class Odd(Exception): pass\nraise Odd", "flash_attn.Odd"),
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("import os; os.abort()", "crashed with SIGABRT"),
    ],
)
def test_a_package_may_fail_in_any_way(body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    package = doctor._package("flash-attn", "flash_attn")
    assert package is not None
    assert package.broken == reason


def test_a_package_may_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "CHILD_TIME_S", 1)
    assert doctor._package("flash-attn", "flash_attn") == Package("", "no answer within 1 s")


def test_cards_as_nvidia_smi_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'NVIDIA RTX PRO 6000, 12.0, 97887'\necho 'NVIDIA GB10, 12.1, [N/A]'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    first, second = doctor._cards_without_torch()
    assert (first.name, first.capability, round(first.memory_gib, 1)) == ("NVIDIA RTX PRO 6000", (12, 0), 95.6)
    assert (second.capability, second.memory_gib) == ((12, 1), 0)
    command.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert doctor._nvidia_smi("driver_version") == ([], "No devices were found")


def test_dot_kernel_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16: the interpreter multiplies the bits of bfloat16 as integers."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    outcome, failure = doctor._ask(doctor.compare_dot, ["cpu"], "float16")
    assert failure == ""
    assert outcome["error"] <= outcome["allowed"] < 1e-4


def test_a_wrong_result_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, passed in ((1e-7, True), (2e-3, False), (float("nan"), False)):
        answer = {"what": "x", "device": "cpu", "error": error, "allowed": 1e-6}
        monkeypatch.setattr(doctor, "_ask", lambda *_, answer=answer: (answer, ""))
        assert doctor._check(doctor.compare_dot, ["cpu"]).passed is passed


def test_exit_code_and_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: OLD_DRIVER)
    with pytest.raises(SystemExit) as stop:
        cli.main(["doctor"])
    assert stop.value.code == cli.EXIT_BAD_INPUT
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("1 problem: ")
    assert lines[-2].startswith("problem: driver 575.57.08")
    assert lines[-1].startswith("remark: flash-attn 2.8.3")


def test_this_machine() -> None:
    """The tests run here, so training runs here."""
    done = subprocess.run([sys.executable, "-m", "eagle3_fast", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nready: training runs on " in done.stdout
    found = " ".join(done.stdout.replace("│", " ").split())
    assert re.search(r"passed: linear_divergence \((fused|reference)\) 64 x 64 x 257", found)

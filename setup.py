"""Package list (with the symlinked `kernels`) and the optional C++ module; everything else is in pyproject.toml.

The C++ module is built with PyTorch's stable ABI where the build sees torch and a compiler (`pip install --no-build-isolation`, as the
Makefile does); without them the package installs all the same and runs on its plain PyTorch reference.
"""

import shutil
from pathlib import Path

from setuptools import find_packages, setup

HEADERS = sorted(str(path) for path in Path("csrc").glob("*.h"))
SOURCES = sorted(str(path) for path in Path("csrc").glob("*.cpp"))
FLAGS = [
    "-O3",
    "-std=c++17",
    "-fopenmp-simd",  # loops marked `omp simd` become vector code; no OpenMP runtime
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-DPy_LIMITED_API=0x030A0000",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",  # stable ABI of torch 2.10; older torch runs on the reference
]


def extension() -> dict:
    """`ext_modules` and `cmdclass` for the C++ module, or nothing where it cannot be built."""
    if not SOURCES or shutil.which("c++") is None:
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        return {}
    module = CppExtension("eagle3_fast._C", SOURCES, extra_compile_args=FLAGS, depends=HEADERS, py_limited_api=True)
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": BuildExtension.with_options(optional=True)},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(
    packages=[*find_packages(include=["eagle3_fast*"]), "eagle3_fast.kernels"],
    package_data={"eagle3_fast": ["py.typed"], "eagle3_fast.kernels": ["*.py", "*.md"]},
    **extension(),
)

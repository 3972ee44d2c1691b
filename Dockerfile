# docker build -t baechi .                                  # for CPUs
# docker build -t baechi:cuda --build-arg DEVICE=cuda .     # for CUDA devices: the host needs its driver and the NVIDIA container runtime, no more
ARG PYTHON=3.11
ARG DEVICE=cpu

FROM python:${PYTHON}-slim-bookworm AS base
RUN apt-get update && apt-get install -y --no-install-recommends make gcc g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /baechi
ENV PIP_NO_CACHE_DIR=1

# torch without CUDA, from torch's own index: PyPI's build brings several gigabytes along. All else is PyPI's, so only torch is looked for there.
FROM base AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt .
RUN python3 -m venv .venv && .venv/bin/pip install --no-deps -c constraints.txt --index-url ${TORCH_INDEX} torch

# PyPI's torch brings CUDA's libraries along; the driver comes from the host.
FROM base AS cuda
ENV EXTRAS=torch,transformers,tensorflow-cpu,solvers,plots,nvidia,dev
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM ${DEVICE}
COPY . .
RUN make .venv/installed
ENV PATH=/baechi/.venv/bin:$PATH
ENTRYPOINT ["baechi"]
CMD ["--help"]

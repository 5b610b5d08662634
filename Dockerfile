# CUDA's libraries come with torch's own packages, the driver from the host; so the base needs neither.
#
#   docker build -t ckpt-planner .
#   docker run --rm --gpus all -v "$PWD":/work ckpt-planner report model.py --budget 8GB --device cuda
#
# `make dev-start` builds and runs the target dev, JupyterLab. For a driver too old for the CUDA of PyPI's torch:
# --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS base
ARG TORCH=
ARG TORCH_INDEX=
ARG USER_ID=1000
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1
RUN useradd --create-home --uid "${USER_ID}" planner
WORKDIR /opt/ckpt-planner
# A layer each for torch (gigabytes), for what else is needed, and for the project (kilobytes), which changes most.
COPY scripts scripts
RUN scripts/install.sh torch
COPY pyproject.toml ./
RUN EXTRAS=tensorboard,examples scripts/install.sh dependencies

FROM base AS dev
ARG USER_ID=1000
RUN EXTRAS=tensorboard,examples,plots,notebook,test scripts/install.sh dependencies
COPY --chown=${USER_ID} . .
RUN EXTRAS=tensorboard,examples,plots,notebook,test EDITABLE=1 scripts/install.sh project
USER ${USER_ID}
EXPOSE 8888
ENTRYPOINT ["jupyter", "lab", "--ip=0.0.0.0", "--no-browser"]

FROM base AS runtime
ARG USER_ID=1000
COPY README.md LICENSE ./
COPY planner planner
COPY profiling profiling
RUN EXTRAS=tensorboard,examples scripts/install.sh project
USER ${USER_ID}
WORKDIR /work
ENTRYPOINT ["ckpt-plan"]
CMD ["--help"]

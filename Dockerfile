# docker run --rm --gpus all -v "$PWD":/work ckpt-planner report model.py --budget 8GB --device cuda
# --build-arg BASE=... for another release of PyTorch or CUDA; see hub.docker.com/r/pytorch/pytorch/tags.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
FROM ${BASE}

COPY pyproject.toml README.md LICENSE /opt/ckpt-planner/
COPY planner /opt/ckpt-planner/planner
COPY profiling /opt/ckpt-planner/profiling

# The image's own torch is kept: a constraint, since a dependency that pulls in another would replace a gigabyte.
# PIP_BREAK_SYSTEM_PACKAGES: newer base images install torch for the system's Python.
RUN python -c 'import torch; print("torch==" + torch.__version__)' > /tmp/constraints.txt \
 && PIP_BREAK_SYSTEM_PACKAGES=1 python -m pip install --no-cache-dir -c /tmp/constraints.txt \
    /opt/ckpt-planner "transformers>=4.57" \
 && useradd --create-home planner

USER planner
WORKDIR /work
ENTRYPOINT ["ckpt-plan"]
CMD ["--help"]

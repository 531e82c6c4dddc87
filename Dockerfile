# An image with interlace and everything that the quick start needs, from package indexes alone: Debian's and PyPI's.
#
#   docker build --tag interlace .
#   docker run --rm interlace train quickstart
#
# TORCH_INDEX selects the build of torch. The default is the CPU build; for a GPU, pass PyPI's own index,
# `--build-arg TORCH_INDEX=https://pypi.org/simple`, and start the container with `--gpus all`.
# EXTRAS are extras of pyproject.toml, for instance `--build-arg EXTRAS=serve,lora`.
FROM python:3.12-slim

# The kernels of the native engine are compiled when they are first used.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=serve
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY interlace ./interlace
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" --constraint constraints.txt ".[${EXTRAS}]" \
    && rm -rf /src

RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["interlace"]
CMD ["--help"]

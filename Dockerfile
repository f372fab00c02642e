# One image for every role of docker-compose.yml but PostgreSQL, with a CPU and a GPU target.
# Nothing in it runs as root, and only /var/lib/archsearch and /var/lib/mlflow are written to.
FROM python:3.11.13-slim-bookworm AS base
# curl: health checks; nginx: credentials for optuna-dashboard; postgresql-client: deploy/databases.sh
RUN apt-get update -q \
 && apt-get install -q -y --no-install-recommends curl nginx-light postgresql-client \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home archsearch \
 && install -d -o archsearch -g archsearch /var/lib/archsearch /var/lib/mlflow
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
WORKDIR /opt/archsearch
COPY . .

FROM base AS cpu
ARG PIP_EXTRA_INDEX_URL
RUN TORCH=cpu ./install.sh /opt/venv postgres,server
USER archsearch
WORKDIR /var/lib/archsearch

FROM base AS gpu
# Triton compiles its launchers where it runs.
RUN apt-get update -q \
 && apt-get install -q -y --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
RUN TORCH=cuda ./install.sh /opt/venv postgres,server
USER archsearch
WORKDIR /var/lib/archsearch

# The image of every service of ours: the command line, the jobs with their jars, Spark's master and workers, and
# Airflow with the DAGs.
FROM python:3.11.14-slim-bookworm

# Spark needs a whole Java runtime; procps because Spark's own scripts call ps.
# Debian keeps only the newest of each package, so a version pinned here would soon be gone.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openjdk-17-jre-headless procps tini \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv==0.13.8

# A named volume takes its owner from the folder that it is first mounted over.
RUN useradd --create-home --uid 10001 anabranch \
    && mkdir -p /opt/anabranch /var/lib/anabranch/airflow \
    && chown -R anabranch: /opt/anabranch /var/lib/anabranch
USER 10001:10001
WORKDIR /opt/anabranch
ENV PATH=/opt/anabranch/.venv/bin:$PATH \
    UV_LINK_MODE=copy \
    UV_COMPILE_BYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ANABRANCH_CONF=/opt/anabranch/conf

# Dependencies first: they change less often than the code.
COPY --chown=10001:10001 pyproject.toml uv.lock README.md LICENSE ./
RUN --mount=type=cache,target=/home/anabranch/.cache/uv,uid=10001,gid=10001 \
    uv sync --frozen --no-dev --extra airflow --extra lineage --no-install-project
COPY --chown=10001:10001 anabranch anabranch
COPY --chown=10001:10001 speed_layer speed_layer
COPY --chown=10001:10001 batch_layer batch_layer
COPY --chown=10001:10001 serving_layer serving_layer
COPY --chown=10001:10001 dags dags
COPY --chown=10001:10001 conf conf
# The package carries the documentation, and what `anabranch init` writes.
COPY --chown=10001:10001 docs docs
COPY --chown=10001:10001 docker-compose.yml .env.example .dockerignore ./
COPY --chown=10001:10001 deploy deploy
# The jars are resolved and checked here, so that a container needs no download to start; Java's classes are archived.
RUN --mount=type=cache,target=/home/anabranch/.cache/uv,uid=10001,gid=10001 \
    uv sync --frozen --no-dev --extra airflow --extra lineage && anabranch jars --spark-submit --archive

WORKDIR /var/lib/anabranch
ENTRYPOINT ["tini", "-g", "--"]
CMD ["anabranch", "--help"]

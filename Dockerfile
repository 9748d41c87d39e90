# The image of every service of ours: the command line, the jobs with their jars, and Airflow with the DAGs.
FROM python:3.11-slim-bookworm

# Spark needs a whole Java runtime; procps because Spark's own scripts call ps.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openjdk-17-jre-headless procps tini \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv==0.9.30

RUN useradd --create-home --uid 10001 anabranch \
    && mkdir -p /opt/anabranch /var/lib/anabranch \
    && chown anabranch: /opt/anabranch /var/lib/anabranch
USER anabranch
WORKDIR /opt/anabranch
ENV PATH=/opt/anabranch/.venv/bin:$PATH \
    UV_LINK_MODE=copy \
    PYTHONUNBUFFERED=1 \
    ANABRANCH_CONF=/opt/anabranch/conf

# Dependencies first: they change less often than the code.
COPY --chown=anabranch pyproject.toml uv.lock README.md LICENSE ./
RUN uv sync --frozen --no-dev --extra airflow --no-install-project --no-cache
COPY --chown=anabranch anabranch anabranch
COPY --chown=anabranch speed_layer speed_layer
COPY --chown=anabranch batch_layer batch_layer
COPY --chown=anabranch serving_layer serving_layer
COPY --chown=anabranch dags dags
COPY --chown=anabranch conf conf
# The jars are resolved and checked here, so that a container needs no download to start.
RUN uv sync --frozen --no-dev --extra airflow --no-cache && python -m anabranch.dev.jars

WORKDIR /var/lib/anabranch
ENTRYPOINT ["tini", "-g", "--"]
CMD ["anabranch", "--help"]

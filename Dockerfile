# The image of every service of ours: the command line, the jobs with their jars, Spark's master and workers, and
# Airflow with the DAGs. Everything below /opt belongs to root; the user that runs it can only read it.
FROM python:3.11.14-slim-bookworm AS base
# Spark needs a whole Java runtime; procps because Spark's own scripts call ps.
# Debian keeps only the newest of each package, so a version pinned here would soon be gone.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openjdk-17-jre-headless procps tini \
    && rm -rf /var/lib/apt/lists/*

# The dependencies alone: they change less often than the code. Nothing at run time needs the packages' own tests, C
# headers and examples, Arrow Flight, the libraries of other operating systems, and Spark's Connect server, MLlib and
# RocksDB (stores of stateful queries, and of Spark's external shuffle service).
FROM base AS dependencies
RUN pip install --no-cache-dir uv==0.13.8
WORKDIR /opt/anabranch
ENV UV_LINK_MODE=copy \
    UV_COMPILE_BYTECODE=1
COPY pyproject.toml uv.lock ./
RUN --mount=type=cache,target=/root/.cache/uv \
    uv sync --frozen --no-dev --extra airflow --extra lineage --extra page --extra postgres --extra protobuf \
    --no-install-project
WORKDIR /opt/anabranch/.venv/lib/python3.11/site-packages
RUN rm -r pyspark/examples pyspark/data pyarrow/include pyarrow/tests pandas/tests \
        pyarrow/*flight* pyspark/jars/netty-*-osx-*.jar pyspark/jars/netty-*-windows-*.jar \
        pyspark/jars/rocksdbjni-*.jar pyspark/jars/spark-mllib_*.jar pyspark/jars/breeze*.jar \
        pyspark/jars/spire*.jar pyspark/jars/cats-kernel*.jar pyspark/jars/spark-connect_*.jar \
    && find numpy scipy -type d -name tests -prune -exec rm -r {} +

# The jars that the jobs need, without those of the development services. The stage depends on the two files and on the
# Ivy that pyspark ships: no change of code, configuration or DAGs downloads them again.
FROM base AS jars
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /jars
COPY conf/jvm/ivy.xml conf/jvm/jars.sha256 /tmp/
RUN --mount=type=bind,from=dependencies,source=/opt/anabranch/.venv/lib/python3.11/site-packages/pyspark/jars/ivy-2.5.3.jar,target=/tmp/ivy.jar \
    --mount=type=cache,target=/root/.ivy2 \
    folder=$(cat /tmp/ivy.xml /tmp/jars.sha256 | sha256sum | cut -c 1-16) \
    && for pause in 2 4 8 0; do \
        java -jar /tmp/ivy.jar -ivy /tmp/ivy.xml -cache /root/.ivy2 -confs spark \
            -retrieve "$folder/[conf]/[artifact]-[revision].[ext]" && break; \
        sleep $pause; \
    done \
    && grep '  spark/' /tmp/jars.sha256 | sed "s|  |  $folder/|" | sha256sum --check --quiet

FROM base
# A named volume takes its owner from the folder that it is first mounted over.
RUN useradd --create-home --uid 10001 anabranch \
    && mkdir -p /var/lib/anabranch/airflow \
    && chown -R anabranch: /var/lib/anabranch
ENV PATH=/opt/anabranch/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    ANABRANCH_CACHE=/opt/anabranch \
    ANABRANCH_CONF=/opt/anabranch/conf
COPY --from=jars /jars /opt/anabranch/jars
COPY --from=dependencies /opt/anabranch/.venv /opt/anabranch/.venv
COPY --chmod=755 deploy/kubernetes/executor /usr/local/bin/executor
# The package, and where plain `spark-submit` finds the jars.
WORKDIR /src
RUN --mount=type=bind,source=.,target=/src,rw \
    --mount=type=bind,from=dependencies,source=/usr/local/bin/uv,target=/usr/local/bin/uv \
    --mount=type=cache,target=/root/.cache/uv \
    uv pip install --python /opt/anabranch/.venv/bin/python --no-deps --compile-bytecode --link-mode copy /src \
    && anabranch jars --jobs-only --spark-submit && rm -f /opt/anabranch/.venv/.lock
# With the file that the link dags/anabranch_conf.py names.
RUN --mount=type=bind,source=dags,target=/src/dags \
    --mount=type=bind,source=anabranch/config,target=/src/anabranch/config \
    cp -rL /src/dags /opt/anabranch/dags
COPY conf /opt/anabranch/conf

USER 10001:10001
WORKDIR /var/lib/anabranch
ENTRYPOINT ["tini", "-g", "--"]
CMD ["anabranch", "--help"]

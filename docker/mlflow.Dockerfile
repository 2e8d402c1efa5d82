# MLflow's tracking server with basic auth on PostgreSQL; docker/compose.yaml starts it with its database.
#
#   docker build -f docker/mlflow.Dockerfile -t hpcdist-mlflow .        or: hpcdist image build --target mlflow

ARG BASE_IMAGE=docker.io/library/ubuntu:24.04@sha256:224a1869083a311ef3f13648a154ba79832fbef6364d31493642ca03082da254

FROM ${BASE_IMAGE} AS tools
SHELL ["/bin/bash", "-euxo", "pipefail", "-c"]
RUN apt-get update; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates python3-venv; \
    apt-get clean; \
    rm -rf /var/lib/apt/lists/*
COPY docker/requirements-build.txt /tmp/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -m venv /opt/tools; \
    /opt/tools/bin/pip install --no-cache-dir --require-hashes -r /tmp/requirements-build.txt

FROM tools AS sbom-tools
SHELL ["/bin/bash", "-euxo", "pipefail", "-c"]
COPY docker/requirements-sbom.txt /tmp/
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    python3 -m venv /opt/sbom; \
    /opt/sbom/bin/pip install --no-cache-dir --require-hashes -r /tmp/requirements-sbom.txt
COPY docker/sbom.py /opt/sbom/

FROM tools AS packages
SHELL ["/bin/bash", "-euxo", "pipefail", "-c"]
COPY docker/requirements-mlflow.txt /opt/mlflow/
RUN --mount=type=secret,id=uv.toml,target=/etc/uv/uv.toml \
    export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_HTTP_TIMEOUT=180 UV_NO_CACHE=1; \
    /opt/tools/bin/uv venv --python /usr/bin/python3 --allow-existing /opt/mlflow; \
    /opt/tools/bin/uv pip install --python /opt/mlflow/bin/python --compile-bytecode --require-hashes \
        -r /opt/mlflow/requirements-mlflow.txt

FROM ${BASE_IMAGE} AS content
SHELL ["/bin/bash", "-euxo", "pipefail", "-c"]
RUN apt-get update; \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates python3 tini; \
    apt-get clean; \
    rm -rf /var/lib/apt/lists/*
COPY --from=packages /opt/mlflow /opt/mlflow

FROM content AS sbom
COPY --from=sbom-tools /opt/sbom /opt/sbom
RUN /opt/sbom/bin/python /opt/sbom/sbom.py hpcdist-mlflow "" /opt/mlflow/bin/python > /sbom.cdx.json

FROM content AS mlflow
SHELL ["/bin/bash", "-euxo", "pipefail", "-c"]
COPY --from=sbom /sbom.cdx.json /usr/share/doc/hpcdist/
ARG UID=1000
ARG GID=1000
# Any user may write artifacts: compose starts the server as the owner of the secrets.
RUN if name=$(getent passwd "$UID" | cut -d: -f1) && [ -n "$name" ]; then userdel --remove "$name"; fi; \
    getent group "$GID" >/dev/null || groupadd --gid "$GID" mlflow; \
    useradd --uid "$UID" --gid "$GID" --home-dir /home/mlflow --create-home --shell /bin/sh mlflow; \
    mkdir /artifacts; \
    chmod 1777 /home/mlflow /artifacts
COPY --chmod=755 docker/mlflow-server.sh /usr/local/bin/mlflow-server
COPY --chmod=755 docker/mlflow-users.py /usr/local/bin/mlflow-users
# 127.0.0.1 avoids accidental access; compose listens on the container's network and publishes locally.
ENV PATH=/opt/mlflow/bin:$PATH \
    HOME=/home/mlflow \
    MLFLOW_HOST=127.0.0.1 \
    MLFLOW_PORT=5000 \
    MLFLOW_DISABLE_TELEMETRY=true \
    MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false \
    DB_URI=postgresql+psycopg2://mlflow@db:5432/mlflow
ARG REVISION=""
ARG CREATED=""
ARG BASE_IMAGE
# Set by `hpcdist image build`: the tag of BASE_IMAGE, its digest, and the id of a local image without a digest.
ARG BASE_NAME
ARG BASE_DIGEST=""
ARG BASE_ID=""
LABEL org.opencontainers.image.title="hpcdist-mlflow" \
      org.opencontainers.image.description="MLflow's tracking server with basic auth on PostgreSQL" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${BASE_NAME:-$BASE_IMAGE}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}" \
      hpcdist.base.id="${BASE_ID}" \
      hpcdist.sbom="/usr/share/doc/hpcdist/sbom.cdx.json"
VOLUME /artifacts
EXPOSE 5000
USER ${UID}:${GID}
WORKDIR /home/mlflow
HEALTHCHECK --interval=10s --timeout=5s --start-period=90s --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"MLFLOW_PORT\"]}/health', timeout=4)"]
ENTRYPOINT ["tini", "--", "mlflow-server"]

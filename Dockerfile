# docker build -t blendserve .
# docker run -p 8000:8000 blendserve demo --page      a page over Python's reference; the printed URL has its API key
# docker run -p 8000:8000 -v "$PWD/indexes:/data/indexes" blendserve serve --host 0.0.0.0 --api-key SECRET -i docs
#
# .ci/image runs the same steps where there is no Docker.
FROM python:3.11-slim-bookworm AS wheel
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make
WORKDIR /src
COPY setup.cfg pyproject.toml Makefile README.md LICENSE ./
COPY requirements ./requirements
COPY scripts/locked.sh ./scripts/
COPY blendserve ./blendserve
# Kernels for every instruction set are compiled here; the image that serves needs no compiler.
RUN make wheel

FROM python:3.11-slim-bookworm
# PyPI has the CUDA build of torch for Linux. For a GPU: docker build --build-arg TORCH_INDEX= .
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY --from=wheel /src/dist ./dist
COPY requirements ./requirements
COPY scripts/install_image.sh scripts/locked.sh ./scripts/
RUN sh scripts/install_image.sh /opt/blendserve \
    && useradd --create-home --uid 1000 blendserve \
    && mkdir -p /data/cache /data/indexes \
    && chown -R 1000 /data

ENV PATH=/opt/blendserve/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/data/cache \
    BLENDSERVE_DEMO_HOST=0.0.0.0

USER 1000
WORKDIR /data
VOLUME ["/data/indexes", "/data/cache"]
EXPOSE 8000

HEALTHCHECK --interval=10s --timeout=3s --start-period=120s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready', timeout=2)"]

# SIGTERM drains: give `docker stop` longer than serve.drain_s.
STOPSIGNAL SIGTERM
ENTRYPOINT ["blendserve"]
CMD ["demo", "--page"]

"""vLLM's server in a process of its own, by the Python of another environment.

It is what `vllm serve` runs. That command asks for a package called vllm, and fails with the CPU build from PyPI.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from blendserve.errors import ServeError

START_S = 1800.0  # with compilation
POLL_S = 0.5


class VllmServer:
    """Answers at `url` inside the `with` block. Raises ServeError when it ends before."""

    def __init__(
        self,
        python: Path,
        model: str,
        log: Path,
        connector: Mapping[str, Any] | None = None,
        options: Sequence[str] = (),
        threads: int = 1,
    ) -> None:
        """connector: settings of BlendConnector; None: plain vLLM."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        command = [
            str(python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            model,
            "--port",
            str(port),
        ]
        command += ["--host", "127.0.0.1", *options]
        if connector is not None:
            transfer = {
                **{"kv_connector": "BlendConnector", "kv_role": "kv_both"},
                **{"kv_load_failure_policy": "recompute", "kv_connector_extra_config": dict(connector)},
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        settings = {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        with log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **settings})

    def __enter__(self) -> VllmServer:
        end = time.monotonic() + START_S
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > end:
                self.__exit__()
                raise ServeError(f"vLLM did not start: see {self.log}", path=self.log)
            time.sleep(POLL_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def _is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False

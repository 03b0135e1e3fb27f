"""nginx in a folder of its own, until the block ends."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

START_S = 60.0
CONFIG = """
daemon off;
master_process off;
pid nginx.pid;
error_log nginx.log;
events {{}}
http {{
    access_log requests.log;
    client_body_temp_path t1; proxy_temp_path t2; fastcgi_temp_path t3; uwsgi_temp_path t4; scgi_temp_path t5;
    {http}
    server {{ listen 127.0.0.1:{port}; {server} }}
}}
"""


class Nginx:
    """A server. A context manager."""

    def __init__(self, program: str, folder: Path, server: str, http: str = "") -> None:
        """server, http: lines of these blocks."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.folder, self.url = folder, f"http://127.0.0.1:{self.port}"
        (folder / "nginx.conf").write_text(CONFIG.format(http=http, server=server, port=self.port))
        self._command = [program, "-p", str(folder), "-c", "nginx.conf", "-e", str(folder / "nginx.log")]

    @staticmethod
    def program() -> str | None:
        """The path of nginx, if it is installed."""
        return shutil.which("nginx", path=f"/usr/sbin:/usr/local/bin:{os.environ['PATH']}")

    @property
    def requests(self) -> list[str]:
        """The paths that were asked for."""
        lines = (self.folder / "requests.log").read_text().splitlines()
        return [line.split('"')[1].split()[1] for line in lines]

    def __enter__(self) -> Nginx:
        self._process = subprocess.Popen(self._command)
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            with socket.socket() as probe:
                if not probe.connect_ex(("127.0.0.1", self.port)):
                    return self
            time.sleep(0.01)
        self.__exit__(None, None, None)
        raise TimeoutError(f"nginx does not listen: see {self.folder / 'nginx.log'}")

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()

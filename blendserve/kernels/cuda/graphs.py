"""Work captured in a CUDA graph, and replayed: its launches cost the host nothing any more.

What is replayed is fixed, addresses included, so everything that changes from time to time lies in device memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

Replayed = Callable[[], Tensor]  # does captured work again -> its result, in the same memory each time
Capture = Callable[[Callable[[], Tensor], torch.device], Replayed]


class CudaGraph:
    """Work captured on a stream of its own, which all captures of a device share: so do their cuBLAS workspaces.

    Raises RuntimeError when it cannot be captured; the calling thread's stream is the same afterwards.
    """

    def __init__(self, work: Callable[[], Tensor], device: torch.device) -> None:
        with capturing:  # one at a time in a process
            stream = capture_stream(device)
            ours = torch.cuda.current_stream(device)
            self._graph = torch.cuda.CUDAGraph()
            stream.wait_stream(ours)
            try:
                with torch.cuda.stream(stream):
                    work()  # for what this stream has not done before
                    self._out = self._captured(work, device)
            finally:
                ours.wait_stream(stream)

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._out

    def _captured(self, work: Callable[[], Tensor], device: torch.device) -> Tensor:
        """What torch.cuda.graph does, but for waiting for the device and giving back all memory that is not in use."""
        pool = torch.cuda.graph_pool_handle()
        # Only this thread is watched for calls that a capture forbids: others load and compute meanwhile.
        self._graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            try:
                return work()
            finally:
                self._graph.capture_end()
        except RuntimeError:
            end_allocations(device, pool)
            raise


capturing = threading.Lock()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which all work of a device is captured."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def end_allocations(device: torch.device, pool: tuple[int, int]) -> None:
    """Tell the allocator that a capture has failed: without that, it waits for the capture's end."""
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)

"""Targets of quality: the ratio of each request that has one, by the controller of the index that it asks."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from blendserve.blend.blender import Blender
from blendserve.config import Config
from blendserve.core import QualityReport
from blendserve.engine.request import PreparedRequest, Request
from blendserve.errors import StoreError
from blendserve.quality.calibration import Calibration, CalibrationStore
from blendserve.quality.controller import LEVELS, Controller
from blendserve.quality.target import Target
from blendserve.retrieve import VectorIndex

NO_INDEX = "answered exactly: only questions over the passages of an index are calibrated"
OFF = "off: the request says what is recomputed"


class Targets:
    """The controllers of one engine. Thread-safe."""

    def __init__(self, config: Config, blender: Blender) -> None:
        self._config, self._blender = config, blender
        self._found: dict[tuple[str, Target], Controller] = {}
        self._lock = threading.Lock()

    def calibrations(self, index: VectorIndex) -> CalibrationStore:
        """Where the index's calibration is kept. Raises StoreError."""
        config, blender = self._config, self._blender
        blend, key = config.blend, blender.key
        work = (
            blend.policy,
            blend.correction,
            blend.near,
            blend.refine,
            blender.priors.hash(),
        )
        rest = key.dtype, config.store.codec, config.model.decode_weights, config.retrieve.top_k
        prompt = key.context, config.prompt.model_dump()
        return CalibrationStore.of(blender.store, index.path.name, key.fingerprint, work, rest, prompt)

    def controller(self, index: VectorIndex, target: Target) -> Controller:
        """The controller of one target over one index. It reads its calibration once; without the store, it has none."""
        name = str(index.path), target
        with self._lock:
            if found := self._found.get(name):
                return found
        try:
            calibration = self.calibrations(
                index
            ).load()  # without the lock, as other indexes are asked for meanwhile
        except StoreError:  # answers are exact until it can be read
            return Controller(target, None)
        usable = calibration if calibration and calibration.fits(len(index)) else None
        with self._lock:
            return self._found.setdefault(name, Controller(target, usable))

    def use(self, index: VectorIndex, calibration: Calibration) -> None:
        """Store an index's new calibration; its controllers begin anew. Raises StoreError."""
        self.calibrations(index).save(calibration)
        with self._lock:
            self._found = {name: of for name, of in self._found.items() if name[0] != str(index.path)}

    def all(self) -> list[tuple[str, Controller]]:
        """The controllers of all indexes and targets that were asked for, with the index's name."""
        with self._lock:
            return [(path.rpartition("/")[2], controller) for (path, _), controller in self._found.items()]

    def apply(
        self, prepared: PreparedRequest, request: Request, indexes: Sequence[VectorIndex]
    ) -> PreparedRequest:
        """The request with the ratio that its target needs. indexes: that its passages are from."""
        target = Target.of(prepared.blend)
        if target is None:
            return replace(prepared, quality=QualityReport(str(Target.of(self._config.blend)), None, "", OFF))
        if prepared.blend.method in ("full", "prefix"):
            return replace(prepared, quality=QualityReport(str(target), None, "", "kept: answers are exact"))
        if request.passages is not None or prepared.prompt.is_plain or not indexes:
            exact = prepared.blend.without_target(method="prefix")
            return replace(prepared, blend=exact, quality=QualityReport(str(target), None, "", NO_INDEX))
        controllers = [self.controller(index, target) for index in indexes]
        chosen = max(controllers, key=lambda controller: LEVELS.index(controller.ratio))
        ratio, report = chosen.ratio, chosen.report()
        values = {"method": "prefix"} if ratio is None else {"ratio": ratio}
        controller = chosen if len(controllers) == 1 and chosen.checked_ratios else None
        blend = prepared.blend.without_target(**values)
        return replace(prepared, blend=blend, quality=report, controller=controller)

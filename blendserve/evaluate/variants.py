"""What is compared: a method with its settings, written as one short word.

    full  prefix  reuse  transformers  exact
    POLICY[check layers]+CORRECTION@RATIO/BEHIND/CODEC      query+shift@0.15   deviation[1,2,3]@0.15   query@0.05/bos

Only the policy must be said. Without a correction nothing is corrected; without a ratio the run's list of ratios is
used; BEHIND is what chunk KV is computed behind (config.py, prompt.kv_context), by default the run's; CODEC, written name
or name@level as store.codec, is what it goes through (coded.py), by default none: reuse/int8, query@0.15/cachegen@1.
In place of CODEC an edit (edits.py): the store holds what the passages were before it, as in query@0.15/numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from blendserve.config import BlendConfig, KVContext, Method, changed
from blendserve.errors import ConfigError
from blendserve.evaluate import edits
from blendserve.registry import CODECS, CORRECTIONS, POLICIES, codec_word, nearest, parse_codec
from blendserve.registry import REUSE as REUSED

if TYPE_CHECKING:  # it takes torch, and help and settings come from here
    from blendserve.blend.policies.base import Policy

Kind = Literal["full", "prefix", "reuse", "transformers", "exact", "blend"]

FULL, REUSE, TRANSFORMERS, EXACT = "full", "reuse", "transformers", "exact"
PLAIN: dict[str, Kind] = {
    "full": "full",
    "prefix": "prefix",
    "reuse": "reuse",
    "transformers": "transformers",
    "exact": "exact",
}
DEFAULT = f"{POLICIES.default}+{CORRECTIONS.default}@{BlendConfig().share:g}"
EXAMPLE = f"{POLICIES.default}+{CORRECTIONS.default}@0.15"

_WORD = re.compile(
    r"(?P<name>[a-z_]+)"
    r"(?:\[(?P<layers>\d+(?:\s*,\s*\d+)*)\])?"
    r"(?:\+(?P<correction>[a-z_]+))?"
    r"(?:@(?P<ratio>\d*\.?\d+))?"
    r"(?P<over>(?:/[a-z0-9_]+(?:@[^/@]*)?){0,2})"
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One method of a run."""

    kind: Kind
    blend: BlendConfig
    kv_context: KVContext | None = None  # None = the run's
    codec: str | None = None  # that its KV goes through, None = none
    edit: str | None = None  # since which the passages are not what is stored, None = they are

    @property
    def name(self) -> str:
        """The shortest word for it; equal names, equal variants."""
        curve, slash, behind = self.curve.partition("/")
        return f"{curve}{'' if self.ratio is None else f'@{self.ratio:g}'}{slash}{behind}"

    @property
    def uncoded(self) -> str:
        """The same method without a codec."""
        return Variant(self.kind, self.blend, self.kv_context, edit=self.edit).name

    @property
    def unedited(self) -> str | None:
        """The same method where the passages themselves are stored; None where they are."""
        if self.edit is None:
            return None
        return Variant(self.kind, changed(self.blend, near=False), self.kv_context, self.codec).name

    @property
    def uncorrected(self) -> str | None:
        """The same method without a correction; None where it has none."""
        if self.kind != "blend" or self.blend.correction == REUSED["correction"]:
            return None
        blend = changed(self.blend, correction=REUSED["correction"])
        return Variant(self.kind, blend, self.kv_context, self.codec, self.edit).name

    @property
    def ratio(self) -> float | None:
        """The share of tokens it recomputes, None where that is no choice."""
        return self.blend.share if self.kind == "blend" and _policy(self.blend.policy).has_ratio else None

    @property
    def curve(self) -> str:
        """What it has in common with the same method at other ratios: one line of a plot."""
        blend, behind = (
            self.blend,
            "".join(f"/{part}" for part in (self.kv_context, self.codec, self.edit) if part),
        )
        if self.kind != "blend":
            return f"{self.kind}{behind}"
        several = blend.check_layers != BlendConfig().check_layers and _policy(blend.policy).has_check_layers
        layers = f"[{','.join(map(str, blend.check_layers))}]" if several else ""
        correction = f"+{blend.correction}" if blend.correction != REUSED["correction"] else ""
        return f"{blend.policy}{layers}{correction}{behind}"

    def __str__(self) -> str:
        return self.name


def variants(
    words: Iterable[str], ratios: Sequence[float], seed: int = 0, coded: bool = False
) -> tuple[Variant, ...]:
    """The variants of these words, each once. `full` and `reuse` are always first: all others are measured by them.

    coded: methods over coded KV, and `exact`, are taken, too. Raises ConfigError naming the word that is none.
    """
    found = [variant for word in (FULL, REUSE, *words) for variant in _variants(word, ratios, seed)]
    for variant in () if coded else found:
        if variant.codec or variant.edit or variant.kind == EXACT:
            raise ConfigError(
                f"method {variant.name!r} is for `blendserve evaluate`: `blendserve bench codec` tells how fast "
                "codecs are, `blendserve bench near` what an edit costs"
            )
    return tuple({variant.name: variant for variant in found}.values())


def _variants(word: str, ratios: Sequence[float], seed: int) -> list[Variant]:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ConfigError(f"method {word!r} cannot be read: write it like full, reuse or {EXAMPLE}")
    parts = match.groupdict()
    behind, codec, edit = _over(word, parts.pop("over"))
    if (kind := PLAIN.get(parts["name"])) is not None:
        if any(parts[part] for part in ("layers", "correction", "ratio")):
            raise ConfigError(f"method {word!r}: {kind!r} takes no layers, correction or ratio")
        if codec and kind in (FULL, TRANSFORMERS):
            raise ConfigError(f"method {word!r}: {kind!r} reads no stored KV, so no codec changes it")
        if edit and kind != "reuse":
            raise ConfigError(f"method {word!r}: {kind!r} reads no chunks' KV, so no edit changes it")
        method: Method = "full" if kind == "transformers" else "prefix" if kind == "exact" else kind
        return [Variant(kind, BlendConfig(method=method, near=edit is not None), behind, codec, edit)]
    chosen = [float(parts["ratio"])] if parts["ratio"] else list(ratios)
    if parts["name"] in POLICIES.names and not _policy(parts["name"]).has_ratio:
        chosen = chosen[:1]
    if not chosen:
        raise ConfigError(f"method {word!r} has no ratio: write {word}@0.15, or give ratios for all")
    blends = (changed(_blend(word, parts, ratio, seed), near=edit is not None) for ratio in chosen)
    return [Variant("blend", blend, behind, codec, edit) for blend in blends]


def _blend(word: str, parts: dict[str, Any], ratio: float, seed: int) -> BlendConfig:
    values: dict[str, Any] = {
        "policy": parts["name"],
        "correction": parts["correction"] or REUSED["correction"],
        "seed": seed,
    }
    if parts["layers"]:
        if parts["name"] not in POLICIES.names or not _policy(parts["name"]).has_check_layers:
            having = " and ".join(name for name in POLICIES.names if _policy(name).has_check_layers)
            raise ConfigError(f"method {word!r}: only {having} has check layers")
        values["check_layers"] = tuple(int(layer) for layer in parts["layers"].split(","))
    try:
        return BlendConfig(method="blend", ratio=ratio, **values)
    except ConfigError as error:
        raise ConfigError(f"method {word!r}: {error}") from None


def _over(word: str, parts: str) -> tuple[KVContext | None, str | None, str | None]:
    """What its chunks are computed behind, the codec that they go through, and the edit since they were stored."""
    behind: str | None = None
    codec: str | None = None
    edit: str | None = None
    known = list(get_args(KVContext))
    for part in parts.split("/")[1:]:
        if part in known and behind is None and codec is None and edit is None:
            behind = part
        elif edits.known(part) and codec is None and edit is None:
            edit = part
        elif edit is None and part.partition("@")[0] in CODECS.names and codec is None:
            try:
                codec = codec_word(*parse_codec(part))
            except ValueError as error:
                raise ConfigError(f"method {word!r}: {error}") from None
        else:
            raise ConfigError(
                f"method {word!r}: no chunks can be computed behind {part!r}, and it is no codec or edit behind that: "
                f"{nearest(part, [*known, *CODECS.names, *edits.EDITS])}"
            )
    return cast("KVContext | None", behind), codec, edit


def _policy(name: str) -> type[Policy]:
    return cast("type[Policy]", POLICIES.load(name))

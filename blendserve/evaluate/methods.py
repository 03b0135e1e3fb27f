"""Method strings: what an evaluation or a bench compares.

    full  prefix  reuse  transformers  exact
    POLICY+CORRECTION@RATIO/KV_CONTEXT/CODEC      query+shift@0.15   deviation[1,2,3]@0.15   query@0.05/bos
    POLICY+CORRECTION@RATIO~REFINE                query+prior@0.05~0.15: refined after the first token

Only the policy is required. Default: no correction, the run's ratios, KV computed after the prefix, no codec. POLICY,
CORRECTION and CODEC are written like `blend.policy`, `blend.correction` and `store.codec`: deviation[1,2], reuse/int8,
query@0.15/cachegen@1. An edit (edits.py) may stand in a codec's place: the store then holds the previous revision of each
passage, as in query@0.15/numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from blendserve.config import BlendConfig, KVContext, Method
from blendserve.errors import ConfigError
from blendserve.evaluate import edits
from blendserve.registry import CODECS, CORRECTIONS, FULL_REUSE, POLICIES, codec_word, nearest, parse_codec

Kind = Literal["full", "prefix", "reuse", "transformers", "exact", "blend"]

FULL, REUSE, TRANSFORMERS, EXACT = "full", "reuse", "transformers", "exact"
DEFAULT = f"{POLICIES.default}+{CORRECTIONS.default}@0.05"
NO_CORRECTION = FULL_REUSE["correction"]
EXAMPLE = f"{POLICIES.default}+{CORRECTIONS.default}@0.15"
OWN_CONTEXT: KVContext = "prefix"  # what the engine computes chunk KV after


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """One method of a run."""

    kind: Kind
    blend: BlendConfig
    kv_context: KVContext = OWN_CONTEXT
    codec: str | None = None
    edit: str | None = None

    @property
    def name(self) -> str:
        """The shortest method string; equal names, equal methods."""
        base, slash, suffixes = self.series.partition("/")
        base, tilde, refine = base.partition("~")
        return f"{base}{'' if self.ratio is None else f'@{self.ratio:g}'}{tilde}{refine}{slash}{suffixes}"

    @property
    def series(self) -> str:
        """The name without the ratio: one line of a plot."""
        context = "" if self.kv_context == OWN_CONTEXT else self.kv_context
        suffixes = "".join(f"/{part}" for part in (context, self.codec, self.edit) if part)
        blend = self.blend
        if self.kind != "blend":
            return f"{self.kind}{suffixes}"
        correction = f"+{blend.correction}" if blend.correction != NO_CORRECTION else ""
        refine = f"~{blend.refine:g}" if blend.refine else ""
        return f"{blend.policy}{correction}{refine}{suffixes}"

    @property
    def ratio(self) -> float | None:
        """The recompute ratio; None where the method has none."""
        has_one = self.kind == "blend" and has_ratio(self.blend.policy)
        return float(self.blend.ratio or 0.0) if has_one else None

    @property
    def uncoded(self) -> str:
        """The same method without a codec."""
        return replace(self, codec=None).name

    @property
    def unedited(self) -> str | None:
        """The same method over the passages themselves; None without an edit."""
        return replace(self, edit=None).name if self.edit else None

    @property
    def uncorrected(self) -> str | None:
        """The same method without a correction; None where it has none."""
        if self.kind != "blend" or self.blend.correction == NO_CORRECTION:
            return None
        return replace(self, blend=self.blend.with_values(correction=NO_CORRECTION)).name

    def __str__(self) -> str:
        return self.name


def parse_methods(
    words: Iterable[str], ratios: Sequence[float], coded: bool = False
) -> tuple[MethodSpec, ...]:
    """Parse method strings. `full` and `reuse` always come first: every other method is compared with them.

    coded: allow codecs, edits and `exact`. Raises ConfigError with the word.
    """
    found = [method for word in (FULL, REUSE, *words) for method in _parse(word, ratios)]
    for method in () if coded else found:
        if method.codec or method.edit or method.kind == EXACT:
            raise ConfigError(
                f"method {method.name!r} is for `blendserve evaluate --layout own`; `blendserve bench codec` measures "
                "codecs"
            )
    return tuple({method.name: method for method in found}.values())


def _parse(word: str, ratios: Sequence[float]) -> list[MethodSpec]:
    base, *suffixes = word.split("/")
    base, tilde, refine = base.partition("~")
    base, at, ratio = base.partition("@")
    policy, plus, correction = base.partition("+")
    kv_context, codec, edit = _suffixes(word, suffixes)
    if policy in get_args(Kind) and policy != "blend":
        if tilde or at or plus:
            raise ConfigError(f"method {word!r}: {policy!r} takes no correction or ratio")
        if (codec and policy in (FULL, TRANSFORMERS)) or (edit and policy != REUSE):
            raise ConfigError(f"method {word!r}: {policy!r} reads no KV that {codec or edit!r} changes")
        method = cast(Method, {TRANSFORMERS: "full", EXACT: "prefix"}.get(policy, policy))
        blend = BlendConfig(method=method, near=edit is not None)
        return [MethodSpec(cast(Kind, policy), blend, kv_context, codec, edit)]
    try:
        chosen = [_number(ratio)] if at else list(ratios)
        blend = BlendConfig(
            method="blend",
            policy=policy,
            correction=correction if plus else NO_CORRECTION,
            refine=_number(refine) if tilde else 0.0,
            near=edit is not None,
        )
        if not has_ratio(blend.policy):
            chosen = chosen[:1]
        found = [MethodSpec("blend", blend.with_values(ratio=r), kv_context, codec, edit) for r in chosen]
    except ConfigError as error:
        raise ConfigError(f"method {word!r}: {error}; write it like full, reuse or {EXAMPLE}") from None
    if not found:
        raise ConfigError(f"method {word!r} has no ratio: write {word}@0.15, or set ratios for all methods")
    return found


def _number(text: str) -> float:
    """Raises ConfigError."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a number") from None


def _suffixes(word: str, parts: list[str]) -> tuple[KVContext, str | None, str | None]:
    """KV context, codec and edit; a codec and an edit exclude each other."""
    kv_context = cast(KVContext, parts.pop(0)) if parts and parts[0] in get_args(KVContext) else OWN_CONTEXT
    if not parts:
        return kv_context, None, None
    if len(parts) == 1 and edits.is_edit(parts[0]):
        return kv_context, None, parts[0]
    if len(parts) == 1 and parts[0].partition("@")[0] in CODECS.names:
        try:
            return kv_context, codec_word(*parse_codec(parts[0])), None
        except ValueError as error:
            raise ConfigError(f"method {word!r}: {error}") from None
    known = [*get_args(KVContext), *CODECS.names, *edits.EDITS]
    raise ConfigError(
        f"method {word!r}: {parts[-1]!r} is not a KV context, codec or edit: {nearest(parts[-1], known)}"
    )


def has_ratio(policy: str) -> bool:
    """Whether the recompute ratio changes what this policy does."""
    from blendserve.blend.policies import takes  # imports torch; --help imports this module

    return takes(policy, "ratio")

"""All methods over all questions: the same prompts, the same stored KV, one process, one after the other.

    for each question:  retrieve or take its passages -> store the KV of its chunks (once) -> full prefill, the reference
                        -> every other method, in an order that rotates from question to question -> a line each

So whatever slows the machine for a while slows all methods, and a method's place in the order is nobody's fate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from blendserve.blend.blender import Blender
from blendserve.blend.policies.base import make_policy
from blendserve.config import KVContext, PromptConfig, changed
from blendserve.core import Prompt, TokenIds
from blendserve.engine.engine import Engine
from blendserve.engine.generation import TextStream
from blendserve.engine.prompt import PromptBuilder
from blendserve.errors import ConfigError, PromptTooLong
from blendserve.evaluate.answers import Answered, Draw, answer, decisions, transformers_answer
from blendserve.evaluate.coded import coded_store, exact_context, needed, sizes_of
from blendserve.evaluate.edited import revised_blender
from blendserve.evaluate.fidelity import agreement, kl, nll
from blendserve.evaluate.folder import Line, RunFolder
from blendserve.evaluate.formats import Example
from blendserve.evaluate.learning import teach, uses_prior
from blendserve.evaluate.methods import EXACT, FULL, TRANSFORMERS, MethodSpec
from blendserve.evaluate.metrics import exact_match, f1, rouge_l
from blendserve.evaluate.prompts import Context, Setting
from blendserve.evaluate.tasks import TASKS
from blendserve.models.loader import Say
from blendserve.store import ChunkKey

Watch = Callable[[Line | None], None]
"""Told of every prediction as it comes, and None when a question is done."""


class Runner:
    """Measures variants on an engine's reader and store."""

    def __init__(
        self,
        engine: Engine,
        setting: Setting,
        variants: Sequence[MethodSpec],
        makes_room: bool = False,
        say: Say = lambda text: None,
    ) -> None:
        """makes_room: once a question is done, the store may evict its chunks for those of the next ones.

        Raises ConfigError for check layers that the reader does not have, for sampling and for stop strings.
        """
        if engine.config.decode.temperature or engine.config.decode.stop:
            raise ConfigError(
                "evaluation compares whole greedy answers: set decode.temperature to 0 and decode.stop to []",
                setting="decode.temperature" if engine.config.decode.temperature else "decode.stop",
            )
        for variant in variants:
            make_policy(variant.blend).validate(engine.reader.adapter.n_layers)
        self._engine, self._setting, self._makes_room = engine, setting, makes_room
        self._reader, self._decode = engine.reader, engine.config.decode
        self._full = next(v for v in variants if v.name == FULL)
        self._others = [v for v in variants if v.name != FULL]
        self._blenders = {v.kv_context: self._blender(v) for v in variants}
        self._coded = {word: coded_store(engine, word, say) for word in needed(variants)}
        self._over_coded: dict[tuple[KVContext | None, str], Blender] = {}
        self._revised: dict[tuple[KVContext | None, str], Blender] = {}  # of the question at hand
        self._warm = False

    def teach(self, chunks: Sequence[TokenIds], name: str, folder: Path) -> None:
        """Have the methods that use it know how these chunks move: learnt once for what chunks are computed behind."""
        for context in {v.kv_context for v in self._others if uses_prior(v)}:
            teach(self._blenders[context], f"{context or 'run'}-{name}", chunks, folder)

    def run(
        self, examples: Sequence[Example], folder: RunFolder, watch: Watch = lambda _: None
    ) -> dict[str, str]:
        """Every question and method that the folder has no prediction of -> reasons by question that was left out."""
        left_out: dict[str, str] = {}
        for n, example in enumerate(examples):
            wanted = [v for v in self._turned(n) if (example.id, v.name) not in folder.predictions]
            if wanted:
                try:
                    for line in self._question(example, wanted, folder):
                        folder.add_prediction(line)
                        watch(line)
                except PromptTooLong as error:
                    left_out[example.id] = str(error)
            watch(None)
        return left_out

    def _turned(self, n: int) -> list[MethodSpec]:
        """The methods in the order for the n-th question."""
        turn = n % len(self._others)
        return [self._full, *self._others[turn:], *self._others[:turn]]

    def _question(self, example: Example, wanted: Sequence[MethodSpec], folder: RunFolder) -> Iterator[Line]:
        context = self._setting.context(example)
        goes_on = example.is_continuation
        draw = partial(self._setting.prompt, example.question, context, goes_on)
        prompt, given = draw(), self._engine.prompts.text_ids(example.answers[0]) if goes_on else None
        self._check_length(prompt, len(given or ()))
        folder.add_prompt(self._prompt_line(example, context, prompt))
        with self._stored(prompt, wanted):
            self._revise(example, context, prompt, wanted)
            if not self._warm:
                self._warm_up(prompt, wanted)
            full = answer(self._reader, self._blenders[None], self._full, draw, self._decode, given)
            reference = given or decisions(self._reader, full.tokens, full.ended)
            for variant in wanted:
                done, kv = (full, {}) if variant is self._full else self._answer(variant, draw, reference)
                line = self._line(example, variant, done, full, len(prompt), context)
                score = (
                    nll(done.logits, given)
                    if given
                    else TASKS[example.task].score(line["answer"], example.answers)
                )
                yield {**line, "score": score, "kv": kv, **_facts(line["answer"], example)}
            self._revised.clear()

    def _answer(self, variant: MethodSpec, draw: Draw, reference: TokenIds) -> tuple[Answered, Line]:
        """And the bytes of its chunks, coded and not, where it has a codec."""
        if variant.kind == TRANSFORMERS:
            return transformers_answer(self._reader, draw, self._decode, reference), {}
        by = self._coded[variant.codec] if variant.codec else None
        blender = self._blenders[variant.kv_context] if by else self._over(variant)
        if variant.kind == EXACT:
            prompt, kv, taken = exact_context(self._reader.adapter, draw(), by)
            whole = partial(answer, self._reader, blender, variant, lambda: prompt, self._decode, reference)
            return whole(prefix_kv=kv), taken
        if by is not None:
            taken = sizes_of(by, [blender.key(chunk.ids) for chunk in draw().chunks if len(chunk)])
            blender = self._over(variant)
            return answer(self._reader, blender, variant, draw, self._decode, reference), taken
        return answer(self._reader, blender, variant, draw, self._decode, reference), {}

    def _over(self, variant: MethodSpec) -> Blender:
        """The blender over a method's KV."""
        raw = self._blenders[variant.kv_context]
        if variant.edit is not None:
            return self._revised[variant.kv_context, variant.edit]
        if variant.codec is None:
            return raw
        if (found := self._over_coded.get((variant.kv_context, variant.codec))) is None:
            namespace = self._engine.config.store.namespace
            found = self._coded[variant.codec].blender(raw, namespace)
            self._over_coded[variant.kv_context, variant.codec] = found
        return found

    @contextmanager
    def _stored(self, prompt: Prompt, wanted: Sequence[MethodSpec]) -> Iterator[None]:
        """Compute and store the KV that is not there yet, and keep it there meanwhile."""
        chunks, keys = [chunk.ids for chunk in prompt.chunks], dict[ChunkKey, TokenIds]()
        try:
            for context in dict.fromkeys(v.kv_context for v in wanted):
                keys |= {self._blenders[context].key(ids): ids for ids in chunks if ids}
                self._blenders[context].precompute(chunks)
            prefix = self._engine.blender.key(prompt.prefix, ())
            for by in self._coded.values():
                by.fill(self._engine.store, keys, prefix)
            yield
        finally:
            for by in self._coded.values():
                by.drop(keys)
            if self._makes_room:
                self._engine.store.pin(keys, pinned=False)

    def _revise(
        self, example: Example, context: Context, prompt: Prompt, wanted: Sequence[MethodSpec]
    ) -> None:
        """Stores that hold what the passages were before each edit that a method names."""
        engine, prefix = self._engine, self._engine.blender.key(prompt.prefix, ())
        for behind, edit in dict.fromkeys((v.kv_context, v.edit) for v in wanted if v.edit):
            chunks = self._setting.stored_before(edit, example, context)
            self._revised[behind, edit] = revised_blender(engine, self._blenders[behind], chunks, prefix)

    def _warm_up(self, prompt: Prompt, wanted: Sequence[MethodSpec]) -> None:
        """Run every method once, so that the first question does not pay for what is allocated once."""
        for variant in wanted:
            self._over(variant).run(prompt, variant.blend)
        self._warm = True

    def _check_length(self, prompt: Prompt, given: int) -> None:
        limit, reserved = self._reader.adapter.context_limit, max(self._decode.max_new_tokens, given)
        if len(prompt) + reserved > limit:
            raise PromptTooLong(len(prompt), limit, reserved)

    def _line(
        self,
        example: Example,
        variant: MethodSpec,
        done: Answered,
        full: Answered,
        n_prompt: int,
        context: Context,
    ) -> Line:
        text, kls = self._text(done), kl(full.logits, done.logits)
        return {
            "id": example.id,
            "method": variant.name,
            "type": example.type,
            "answer": text,
            "tokens": list(done.tokens),
            "ended": done.ended,
            "f1": f1(text, example.answers),
            "em": exact_match(text, example.answers),
            "rouge_l": rouge_l(text, example.answers),
            "agreement": agreement(text, self._text(full)),
            "identical": done.tokens == full.tokens,
            "first_kl": kls[0],
            "mean_kl": sum(kls) / len(kls),
            "decisions": len(kls),
            "tokens_prompt": n_prompt,
            "recall": context.recall,
            **_spent(done),
            "recomputed": ranges(done.recomputed),
            "seconds": {**done.seconds, "retrieve": context.seconds},
        }

    def _text(self, done: Answered) -> str:
        text: str = self._reader.tokenizer.decode(done.tokens, skip_special_tokens=True)
        return text.strip()

    def _prompt_line(self, example: Example, context: Context, prompt: Prompt) -> Line:
        parts = [prompt.prefix, *(chunk.ids for chunk in prompt.chunks), prompt.suffix]
        return {
            "id": example.id,
            "question": example.question,
            "golds": list(example.answers),
            "type": example.type,
            "needed": list(example.supporting),
            "titles": [passage.title for passage in context.passages],
            "parts": [pieces(self._reader.tokenizer, part) for part in parts],
        }

    def _blender(self, variant: MethodSpec) -> Blender:
        """The engine's own, or one over the same store whose chunks were computed behind something else."""
        engine = self._engine
        if variant.kv_context is None:
            return engine.blender
        prompt: PromptConfig = changed(engine.config.prompt, kv_context=variant.kv_context)
        behind = PromptBuilder(self._reader.tokenizer, prompt).kv_context
        adapter, fingerprint = self._reader.adapter, self._reader.fingerprint
        namespace = engine.config.store.namespace
        return Blender(adapter, fingerprint, engine.store, engine.prompts.prefix, behind, namespace)


def _facts(answer: str, example: Example) -> Line:
    """Whether an answer says what is true, and what was before an edit; nothing where nobody knows what that was."""
    if not example.counterfactual:
        return {}
    said, golds = answer.lower(), [gold.strip().lower() for gold in example.answers]
    return {
        "says_gold": any(gold in said for gold in golds),
        "says_rival": example.counterfactual.lower() in said,
    }


def _spent(done: Answered) -> Line:
    """What a method ran and read; for transformers' own forward, everything and nothing."""
    report = done.report
    if report is None:
        return {
            "tokens_recomputed": 0,
            "tokens_computed": 0,
            "tokens_exact": 0,
            "bytes_loaded": 0,
            "cost": 1.0,
        }
    fields = (
        "tokens_recomputed",
        "tokens_computed",
        "tokens_exact",
        "bytes_loaded",
        "cost",
        "share_recomputed",
    )
    return {name: getattr(report, name) for name in fields}


def ranges(positions: Sequence[int]) -> list[list[int]]:
    """Ascending positions as half-open ranges: what a policy spent its budget on, in little space."""
    found: list[list[int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1][1] += 1
        else:
            found.append([position, position + 1])
    return found


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token; a character split over several comes with the last of them."""
    stream = TextStream(tokenizer)
    return [stream.push(token) for token in ids]

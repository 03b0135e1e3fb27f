"""All methods on all questions: the same prompts and stored KV, one process, one method at a time.

    for each question:  its passages -> KV of their chunks, stored once -> full prefill, the reference
                        -> the other methods, in an order that rotates from question to question

So a machine that slows down for a while slows down all methods, and no method always follows the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from blendserve.blend.policies import validate_blend
from blendserve.core import Prompt, TokenIds
from blendserve.engine.engine import Engine
from blendserve.engine.generate import Detokenizer
from blendserve.errors import ConfigError, PromptTooLong
from blendserve.evaluate import fidelity
from blendserve.evaluate.fidelity import Draw, Generation, nll
from blendserve.evaluate.formats import Example
from blendserve.evaluate.methods import EXACT, FULL, TRANSFORMERS, MethodSpec
from blendserve.evaluate.prompts import PromptSource
from blendserve.evaluate.run_dir import Record, RunDir
from blendserve.evaluate.stores import PromptStores, Sizes
from blendserve.evaluate.tasks import TASKS, agreement, exact_match, f1, rouge_l
from blendserve.quality.fidelity import kl, with_end

Update = Callable[[int, int], None]
COUNTS = ("tokens_recomputed", "tokens_computed", "tokens_exact", "bytes_loaded", "cost", "share_recomputed")
NO_REUSE = {**dict.fromkeys(COUNTS[:4], 0), "cost": 1.0}


class Runner:
    """Runs methods on an engine's model and stores."""

    def __init__(
        self, engine: Engine, source: PromptSource, stores: PromptStores, methods: Sequence[MethodSpec]
    ) -> None:
        """Raises ConfigError for check layers that the model lacks, for sampling and for stop strings."""
        self._decode = engine.config.decode
        if self._decode.temperature or self._decode.stop:
            raise ConfigError(
                "evaluation compares whole greedy answers: set decode.temperature to 0 and decode.stop to []",
                setting="decode.temperature" if self._decode.temperature else "decode.stop",
            )
        for method in methods:
            validate_blend(method.blend, engine.model.decoder)
        self._engine = engine
        self._source = source
        self._stores = stores
        self._full = next(m for m in methods if m.name == FULL)
        self._others = [m for m in methods if m.name != FULL]
        self._is_warm = False

    def run(self, examples: Sequence[Example], run_dir: RunDir, update: Update) -> dict[str, str]:
        """Run every question and method without a prediction -> reason by question that was left out."""
        left_out: dict[str, str] = {}
        for n, example in enumerate(examples):
            turn = n % len(self._others)
            order = [self._full, *self._others[turn:], *self._others[:turn]]
            methods = [m for m in order if (example.id, m.name) not in run_dir.predictions]
            try:
                for prediction in self._predict(example, methods, run_dir) if methods else ():
                    run_dir.add_prediction(prediction)
            except PromptTooLong as error:
                left_out[example.id] = str(error)
            update(n + 1, len(examples))
        return left_out

    def _predict(self, example: Example, methods: Sequence[MethodSpec], run_dir: RunDir) -> Iterator[Record]:
        example, recall, retrieve_s = self._source.with_passages(example)
        draw = partial(self._source.build, example)
        model = self._engine.model
        prompt = draw()
        limit = model.decoder.context_limit
        continuation: TokenIds = ()
        if example.is_continuation:
            continuation = self._engine.prompts.text_ids(example.answers[0])
        reserved = max(self._decode.answer_tokens, len(continuation))
        if len(prompt) + reserved > limit:
            raise PromptTooLong(len(prompt), limit, reserved)
        run_dir.add_prompt(self._prompt_record(example, prompt))
        chunks = self._source.stored_chunks(example)
        previous = partial(self._source.previous_chunks, example)
        with self._stores.holding(chunks, methods, previous):
            if not self._is_warm:  # the first question does not pay for first allocations
                for method in methods:
                    self._stores.blender(method).run(prompt, method.blend)
                self._is_warm = True
            full, _ = self._generate(self._full, draw, continuation or None)
            reference = continuation or with_end(model, full.tokens, self._decode)
            for method in methods:
                done, sizes = (full, {}) if method is self._full else self._generate(method, draw, reference)
                record = self._record(example, method, done, full)
                if continuation:
                    record["score"] = nll(done.logits, continuation)
                record["seconds"]["retrieve"] = retrieve_s
                yield {**record, "recall": recall, "tokens_prompt": len(prompt), "kv": sizes}

    def _generate(
        self, method: MethodSpec, draw: Draw, reference: TokenIds | None
    ) -> tuple[Generation, Sizes]:
        """Generate an answer -> it, and the size of its chunks if coded. reference: None for full prefill."""
        model = self._engine.model
        stores = self._stores
        sizes = Sizes()
        kv = None
        if method.kind == TRANSFORMERS and reference:
            return fidelity.transformers_answer(model, draw, self._decode, reference), sizes
        if method.kind == EXACT:
            prompt, kv, sizes = stores.exact_context(method, draw())
        elif method.codec:
            sizes = stores.sizes(method, draw())
        own = draw if kv is None else lambda: prompt
        blender = stores.blender(method)
        return fidelity.answer(model, blender, method, own, self._decode, reference, kv), sizes

    def _record(self, example: Example, method: MethodSpec, done: Generation, full: Generation) -> Record:
        text = self._text(done)
        kls = kl(full.logits, done.logits)
        golds = example.answers
        record = {
            "id": example.id,
            "method": method.name,
            "type": example.type,
            "answer": text,
            "tokens": list(done.tokens),
            "ended": len(done.tokens) < self._decode.answer_tokens,
            "score": TASKS[example.task].score(text, golds),
            "f1": f1(text, golds),
            "em": exact_match(text, golds),
            "rouge_l": rouge_l(text, golds),
            "agreement": agreement(text, self._text(full)),
            "identical": done.tokens == full.tokens,
            "first_kl": kls[0],
            "mean_kl": sum(kls) / len(kls),
            "decisions": len(kls),
            **({name: getattr(done.report, name) for name in COUNTS} if done.report else NO_REUSE),
            "recomputed": ranges(done.recomputed),
            "seconds": dict(done.seconds),
        }
        if example.counterfactual:  # whether the answer has the current value, and the stale one
            record["says_gold"] = any(gold.strip().lower() in text.lower() for gold in golds)
            record["says_rival"] = example.counterfactual.lower() in text.lower()
        return record

    def _text(self, done: Generation) -> str:
        text: str = self._engine.model.tokenizer.decode(done.tokens, skip_special_tokens=True)
        return text.strip()

    def _prompt_record(self, example: Example, prompt: Prompt) -> Record:
        """A character of several tokens stands with the last one."""
        parts = [prompt.prefix, *(chunk.ids for chunk in prompt.chunks), prompt.suffix]
        streams = [(Detokenizer(self._engine.model.tokenizer), part) for part in parts]
        return {
            "id": example.id,
            "question": example.question,
            "golds": list(example.answers),
            "type": example.type,
            "needed": list(example.supporting),
            "titles": [passage.title for passage in example.contexts],
            "parts": [[stream.push(token) for token in part] for stream, part in streams],
        }


def ranges(positions: Sequence[int]) -> list[list[int]]:
    """Ascending positions as half-open ranges."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return [[int(run[0]), int(run[-1]) + 1] for run in runs if len(run)]

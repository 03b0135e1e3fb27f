"""Turns of a conversation in this process, as a server serves them: how near they are to full prefill."""

from __future__ import annotations

from dataclasses import dataclass

from blendserve.blend.precompute import MissingChunk
from blendserve.core import run
from blendserve.engine.chat import Chat
from blendserve.engine.engine import Engine
from blendserve.engine.learn import Learner
from blendserve.engine.request import Request
from blendserve.quality.fidelity import Verifier
from blendserve.quality.target import Loss

LEAST_KL = 1e-3  # nats: a smaller KL of full reuse may be rounding


@dataclass(frozen=True)
class CheckedTurn:
    """An answer, and the losses of its prefill and of full reuse along full prefill's answer."""

    answer: str
    served: Loss
    reuse: Loss
    n_new: int  # tokens behind what the prefix cache had
    n_reused: int  # those of them whose stored KV was reused

    @property
    def metrics(self) -> dict[str, float]:
        """Without a share of full reuse's KL where nothing was reused."""
        found = {"new": self.n_new, "reused": self.n_reused / self.n_new}
        found |= {"agreement": self.served.agreement, "kl": self.served.kl}
        return found | ({"kl_share": self.served.kl / max(self.reuse.kl, LEAST_KL)} if self.n_reused else {})


class CheckedTalk:
    """A conversation in a scope of its own: its turns are kept, and what it repeats is learnt."""

    def __init__(self, engine: Engine, scope: str, new_tokens: int) -> None:
        tokenizer = engine.model.tokenizer
        self._engine, self._new_tokens = engine, new_tokens
        self._blender = engine.blender.for_scope(scope, learns=True)
        self._learner = Learner(lambda token: tokenizer.decode([token]).endswith("\n"))

    def ask(self, chat: Chat) -> CheckedTurn:
        """Answer the next turn, and compare it with full prefill."""
        engine, blender = self._engine, self._blender
        request = engine.prepare(Request("", plain=chat, decode={"max_new_tokens": self._new_tokens}))
        prompt = blender.match(request.prompt, request.blend)
        verifier = Verifier(engine.model, blender, prompt, request.decode)
        done = run(verifier.prefill(request.blend))
        served = run(verifier.along_full(done))
        answer = run(verifier.greedy(done.result))
        reuse = run(verifier.along_full(run(verifier.prefill(request.blend.with_values(method="reuse")))))
        blender.keep(prompt, done.report, answer[:-1], done.result.cache)
        assert blender.learnt
        learnt = [MissingChunk(ids) for ids in self._learner.see(prompt, done.n_known)]
        run(blender.learnt.write_back(learnt))
        said = [token for token in answer if token not in engine.model.end_tokens]
        n_new = len(prompt) - done.n_known
        n_reused = done.report.tokens_reused
        return CheckedTurn(engine.model.tokenizer.decode(said), served, reuse, n_new, n_reused)

"""Logits -> the next token: penalties, then greedy at temperature 0, else sampling from the likeliest tokens by a seed.

The order of rules is vLLM's: bias, repetition penalty (arXiv 1909.05858), frequency and presence penalties, the grammar,
temperature, min_p, top_k, top_p. No rule sorts the whole vocabulary.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from blendserve.answer import TokenLogprob
from blendserve.config import DecodeConfig
from blendserve.core import Prompt
from blendserve.engine.grammar import Guide
from blendserve.engine.request import AnswerRules

NO_RULES = AnswerRules()
N_RANKED = 256, 4096  # tokens, in which most nuclei end
BLOCK = 64  # tokens that are compared as one, for the largest ones
BUCKET_BITS = 16  # of a float32's 32, that tokens of one bucket may differ in: they are equally likely to 1%


class Sampler:
    """Chooses the tokens of one answer, one after another, from logits [V]."""

    def __init__(
        self,
        config: DecodeConfig,
        rules: AnswerRules = NO_RULES,
        prompt: Prompt | None = None,
        guide: Guide | None = None,
    ) -> None:
        """prompt: whose tokens the repetition penalty counts, too. guide: of the grammar of the rules."""
        self._config = config
        self._rules = rules
        self._guide = guide
        self._generator = torch.Generator().manual_seed(config.seed)
        self._counts = Counter[int]()  # of the answer's tokens, if they are penalised
        self._seen = set(prompt.ids) if prompt and rules.repetition_penalty != 1 else set[int]()

    def __call__(self, logits: Tensor) -> int:
        if self._rules.changes_logits:
            logits = self._penalised(logits.float().cpu().clone())
        token = self._choose(logits) if self._guide is None else self._guided(logits, self._guide)
        if self._rules.changes_logits:
            self._counts[token] += 1
        return token

    def _guided(self, logits: Tensor, guide: Guide) -> int:
        """Mostly a token that is chosen from all is allowed, and no mask is needed.

        If it is not, one is drawn from the allowed ones. Either way, each has its probability among these. That holds
        unless a rule leaves tokens out: others would be left out of the allowed ones.
        """
        is_cut = self._rules.top_k or self._rules.min_p or self._config.top_p < 1
        token = -1 if is_cut and not self._config.is_greedy else self._choose(logits)
        if token < 0 or not guide.allows(token):
            token = self._choose(guide.restrict(logits))
        guide.push(token)
        return token

    def _penalised(self, logits: Tensor) -> Tensor:
        rules = self._rules
        for token, amount in rules.bias.items():
            logits[token] += amount
        if rules.repetition_penalty != 1 and (repeated := self._seen | self._counts.keys()):
            ids = torch.tensor(sorted(repeated))
            found = logits[ids]
            factor = rules.repetition_penalty
            logits[ids] = torch.where(found > 0, found / factor, found * factor)
        if self._counts:
            counts = torch.tensor(list(self._counts.values()), dtype=logits.dtype)
            penalties = rules.frequency_penalty * counts + rules.presence_penalty
            logits[torch.tensor(list(self._counts))] -= penalties
        return logits

    def _choose(self, logits: Tensor) -> int:
        config = self._config
        rules = self._rules
        if config.is_greedy:
            return likeliest(logits)
        probabilities = torch.softmax(logits.float().cpu() / config.temperature, dim=-1)
        ids: Tensor | None = None
        if 0 < rules.top_k < len(probabilities):
            probabilities, ids = top(probabilities, rules.top_k)
        if rules.min_p > 0:
            is_likely = probabilities >= rules.min_p * probabilities.max()
            probabilities = torch.where(is_likely, probabilities, 0.0)
        if config.top_p < 1:
            if rules.top_k or rules.min_p:
                probabilities = probabilities / probabilities.sum()
            probabilities, order = nucleus_of(probabilities, config.top_p)
            ids = order if ids is None else ids[order]
        chosen = draw(probabilities, self._generator)
        return chosen if ids is None else int(ids[chosen])


def logprob_of(logits: Tensor, token: int, n_top: int) -> TokenLogprob:
    """A token's log probability by logits [V], and those of the `n_top` likeliest ones."""
    logits = logits.float().cpu()
    scale = float(logits.logsumexp(0))
    values, ids = top(logits, min(n_top, len(logits)))
    others = zip(ids.tolist(), (values - scale).tolist(), strict=True)
    return TokenLogprob(token, float(logits[token]) - scale, tuple(others))


def likeliest(logits: Tensor) -> int:
    """The token with the largest of logits [V], the first of several. On a CPU numpy finds it 20 times sooner."""
    if logits.device.type != "cpu":
        return int(logits.argmax())
    return int(logits.float().numpy().argmax())


def top(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of values [V] and where they are, as Tensor.topk gives them.

    They are in the k blocks with the largest maxima, which are found without ranking all values.
    """
    n_blocks = len(values) // BLOCK
    if k >= n_blocks // 2:
        return values.topk(k)
    whole = n_blocks * BLOCK
    blocks = values[:whole].view(n_blocks, BLOCK).amax(dim=1).topk(k).indices
    inside = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    candidates = torch.cat([inside, torch.arange(whole, len(values))])
    found, places = values[candidates].topk(k)
    return found, candidates[places]


def draw(probabilities: Tensor, generator: torch.Generator) -> int:
    """A token by its probability [V]: the first whose cumulative sum is above one random number."""
    sums = probabilities.cumsum(0, dtype=torch.float64)
    if not bool(sums[-1] > 0):
        raise RuntimeError("the logits are not numbers")
    at = sums[-1] * torch.rand(1, dtype=torch.float64, generator=generator)
    return min(int(torch.searchsorted(sums, at, right=True)), len(probabilities) - 1)


def nucleus_of(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest tokens whose probabilities [V] sum to `top_p`: theirs, and their ids.

    What the N_RANKED largest do not sum to is counted in buckets, and only the last bucket of the nucleus is sorted.
    """
    for k in (min(n, len(probabilities)) for n in N_RANKED):
        ranked, order = top(probabilities, k)
        n = _needed(ranked, top_p)
        if n < k or k == len(probabilities):
            return ranked[:n], order[:n]
    buckets = probabilities.view(torch.int32) >> BUCKET_BITS  # the larger, the likelier
    sums = torch.bincount(buckets, weights=probabilities.double())
    above = sums.sum() - sums.cumsum(0)
    last = int((above < top_p).nonzero()[0])
    sure = (buckets > last).nonzero()[:, 0]
    edge = (buckets == last).nonzero()[:, 0]
    ranked, order = probabilities[edge].sort(descending=True)
    ids = torch.cat([sure, edge[order[: _needed(ranked, top_p - float(above[last]))]]])
    return probabilities[ids], ids


def _needed(ranked: Tensor, total: float) -> int:
    """How many of these probabilities, the largest first, sum to a total; at least one."""
    before = ranked.cumsum(0, dtype=torch.float64) - ranked
    return max(1, int((before < total).sum()))

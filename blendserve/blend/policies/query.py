"""What the question attends to, as InfoFlow KV (arXiv 2603.05353, section 4): the scores of the scoring pass."""

from __future__ import annotations

from blendserve.blend.policies.base import Policy


class QueryPolicy(Policy):
    """Selects by the scores of the scoring pass alone (blend/scoring.py)."""

    needs_scoring_pass = True

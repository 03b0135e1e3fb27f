"""The text model of a checkpoint that reads pictures too, as a causal model. The vision modules are dropped."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class TextTower(nn.Module):
    """The body and head that the Adapter and own_forward.py run; weights and modules are the checkpoint's."""

    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        self.model, self.lm_head = checkpoint.model.language_model, checkpoint.lm_head
        self.config: Any = checkpoint.config.get_text_config()
        self.generation_config = checkpoint.generation_config

    def forward(self, logits_to_keep: int = 0, **inputs: Any) -> Any:
        """input_ids or inputs_embeds, and what transformers' models take -> its output, with logits [1, S, V]"""
        output = self.model(**inputs)
        logits: Tensor = self.lm_head(output.last_hidden_state[:, -logits_to_keep:])
        cap = getattr(self.config, "final_logit_softcapping", None)
        output["logits"] = logits if cap is None else cap * (logits / cap).tanh()
        return output

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.model.get_input_embeddings()
        return embeddings

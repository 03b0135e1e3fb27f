"""A model that always writes the same answer, so that tests know what a server makes of it."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch

from blendserve.models.loader import LoadedModel
from tests.support.tokenizers import bundled_tokenizer
from tests.support.toy import loaded, toy_llama

LOUD = 100.0  # length of an embedding, beside which what attention adds changes no choice of a token

# As Qwen's, with the tools in front, their results as a turn of the user, and calls as the model writes them.
TOOLS_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# in front of an answer, as Qwen's template has it for a model that must not think
NO_THOUGHTS = "<think></think>\n"
REPLY_TEMPLATE = f"{{%- if messages[-1].role == 'tool' %}}{NO_THOUGHTS}{{% endif %}}"


def scripted_model(*pieces: str, reply: str = "", context: int = 1024) -> LoadedModel:
    """Answers any prompt with these pieces, all different, one token each; then its turn ends.

    reply: its answer, also one token, where the last message is the result of a tool.

    Each token has a direction of its own, which the row of the next token in the output matrix has, too.
    """
    tokens = [*pieces, *((NO_THOUGHTS, reply) if reply else ())]
    tokenizer = copy.deepcopy(bundled_tokenizer())
    tokenizer.chat_template = TOOLS_TEMPLATE + (REPLY_TEMPLATE if reply else "")
    n_before = len(tokenizer)
    assert tokenizer.add_tokens(tokens) == len(tokens)
    model = toy_llama(len(tokenizer), context)
    width = model.config.hidden_size
    basis = torch.eye(width)[: len(tokens) + 1]  # of the prompt's tokens, and of each new one
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        embeddings = 0.5 * torch.nn.functional.normalize(torch.randn(len(tokenizer), width), dim=1)
        embeddings[:, : len(basis)] = 0
        embeddings[:n_before, 0] = 1
        embeddings[n_before:] = basis[1:]
        model.model.embed_tokens.weight.copy_(LOUD * embeddings)
        model.lm_head.weight.zero_()
        new, end = [*range(n_before, len(tokenizer))], tokenizer.eos_token_id
        for chain in ([0, *new[: len(pieces)], end], [*new[len(pieces) :], end]):
            for before, after in pairwise(chain):
                model.lm_head.weight[after] += basis[max(0, before - n_before + 1)]
    return loaded(model, tokenizer)

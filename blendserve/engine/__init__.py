"""One pipeline of requests, for Python callers, HTTP and workers alike; nothing else knows all the stages.

question -> prompt     request.py      options checked, passages found, prompt laid out (prompt.py)
prompt -> answer       generate.py     Sequence: stored KV blended, logits -> tokens -> text; the model's own forward
                                       where the gate (gate.py) says so
one at a time          engine.py       Engine; documents.py: documents change together with their KV
many at a time         batch_engine.py BatchEngine: one thread owns the model, and scheduler.py says what it does
  tenants take turns   fair_executor.py
"""

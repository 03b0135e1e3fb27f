"""One pipeline of requests, for Python callers, HTTP and workers alike; nothing else knows all the stages.

    Request -> Plan      request.py      options checked, passages found, prompt laid out (prompt.py)
    Plan -> Prefill      prefill.py      stored KV blended; the model's own forward where the gate (gate.py) says so
    Prefill -> Answer    generation.py   logits -> tokens -> text, stop strings, timings

    one at a time        engine.py       Engine; library.py: documents come and go with their KV
    many at a time       batching.py     BatchEngine: one thread owns the model, and scheduler.py says what it does
      who waits            queued.py, fair_queue.py
      prefill              a layer at a time (prefill.py), stored KV shared (fetch/copies.py), into a slot (slots.py)
      decode               all running requests a step (steps.py)
      by the way           tasks for the store (background.py)

KV of conversations so far is kept in prefix_cache.py.
"""

"""The engine behind HTTP: one thread owns the model, an event loop talks to clients.

    many clients     app.py        routes, errors, limits on bodies; access.py  whose key it is (keys.py, limits.py)
      one loop       openai_api.py, rag_api.py, library_api.py, status_api.py   bodies in (schema.py), replies out
    one thread       service.py    question -> passages (library.py) -> prompt (conversation.py) -> work (work.py)
    one thread       scheduler.py  who waits (waiting.py), who runs, what is done by the way (upkeep.py)
      the model's      prefill     a layer at a time (turns.py), stored KV shared (sharing.py), into a slot (slots.py)
                       decode      all running requests a step (batch.py), each its own text (writing.py)
    back to the loop               events: started, pieces, finished or failed -> JSON or SSE (replying.py, replies.py)

Beside that: metrics.py, logs.py, jobs.py, settings.py; running.py from settings to an orderly end, child.py a server as
another's process.
"""

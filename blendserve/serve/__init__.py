"""The engine behind HTTP: one thread owns the model, an event loop talks to clients.

    many clients     app.py        routes, errors, limits on bodies; access.py  whose key it is (keys.py, limits.py)
      one loop       openai_api.py, rag_api.py, library_api.py, status_api.py   bodies in (schema.py), replies out
    one thread       service.py    question -> passages -> prompt: a plan (engine/request.py), queued
    one thread       engine/scheduler.py, all that runs the model
    back to the loop               events: started, pieces, finished or failed -> JSON or SSE (replies.py)

Beside that: metrics.py, logs.py, jobs.py, settings.py; running.py from settings to an orderly end, child.py a server as
another's process.
"""

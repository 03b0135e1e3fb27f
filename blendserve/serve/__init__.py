"""The engine behind HTTP: one thread owns the model, an event loop talks to clients.

HTTP (app.py, openai.py, rag.py, library_routes.py)          many clients, one event loop
  -> question to prompt (service.py)                         one thread: embedding and search
  -> waiting (waiting.py) -> scheduler.py                    one thread: the model
       prefill, a layer at a time (turns.py)  into a slot (slots.py)
       decode, all running requests a step (batch.py)
  -> events back to the loop (work.py)
"""

"""The engine over HTTP. One event loop talks to clients; threads retrieve, read the store and run the model.

    request -> middleware.py   body within limits; auth.py: API key -> tenant, rate (keys.py)
            -> a route         openai.py, messages.py, rag.py, documents.py; the body is a model of schemas.py
            -> EngineClient    engine_client.py: retrieve, build the prompt, queue; the engine's thread runs the model
            -> responses.py    events -> JSON or server-sent events, errors -> status

app.py puts the routes together, server.py runs them. delivery.py serves published collections.
"""

"""A cluster that is not there: nodes with caches over one store, requests that are routed to them, and what comes of it."""

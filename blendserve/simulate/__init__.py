"""A cluster that is not there: nodes with caches over one store, requests routed to them, and what comes of it."""

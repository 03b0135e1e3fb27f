"""Collections over MoQ: a store kind for engines, a relay and a publisher (docs/reference/moq.md)."""

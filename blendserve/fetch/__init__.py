"""How chunk KV reaches a prompt: copies in memory, the local store, another machine."""

"""Chunk KV on a Valkey or Redis server, shared by any number of engines."""

"""Knowledge that leaves the machine: published as collections, kept in the store, delivered by serve/delivery.py."""

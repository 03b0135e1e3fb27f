"""Knowledge that leaves the machine: collections, published as files."""

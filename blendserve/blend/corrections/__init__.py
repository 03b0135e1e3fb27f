"""How reused tokens are adjusted. A correction is a class and its line in blendserve/registry.py."""

"""An engine's work on a Ray cluster: chunks computed by actors (precompute.py), questions answered by replicas."""

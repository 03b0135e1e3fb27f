"""Store or recompute? Prices, measured bytes and measured seconds, weighed."""

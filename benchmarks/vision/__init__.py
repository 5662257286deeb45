"""Vision sweeps, their results, and what the results page computes from them."""

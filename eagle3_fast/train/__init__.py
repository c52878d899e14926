"""Training: packing, loading, engine, optimizer, metrics, checkpoints and the loop that joins them."""

"""The draft model: its config, layers, parameters, and the unroll of training-time test."""

"""The verifier: its shape and weights, its hidden states, and the files that hold them."""

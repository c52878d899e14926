"""Plain PyTorch meaning of every op: the product path where no kernel applies, and the oracle of the tests."""

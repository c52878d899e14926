"""How good a draft is: lossless speculative decoding with it, acceptance rates, and speed against plain decoding."""

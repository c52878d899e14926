"""Train EAGLE-3 draft models for speculative decoding, fast and provably right.

Importing the package costs nothing and touches no device: every stage lives in its own subpackage and is imported by the verb
that needs it (see `eagle3_fast.cli`). Start reading at `records.py`.
"""

__version__ = "0.1.0"

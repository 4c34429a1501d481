"""Built-in text: pure functions of a ``numpy.random.Generator`` and a ``heldout`` flag.

The demo model was trained on the side that is not held out; corpora use that side too, and the
held-out side is kept for evaluation. A change of any draw changes what the model has seen, so
``tests/corpora/test_generators.py`` pins the outputs.
"""
